from __future__ import annotations

import math

import pytest
import torch

from isles.workers.models.gpt import GPT, GPTConfig, rotary_tables, rotate

TINY = GPTConfig(layers=2, width=16, heads=2, context=12)


def model(seed: int = 0, config: GPTConfig = TINY) -> GPT:
    return GPT(config, torch.Generator().manual_seed(seed))


def rows(seed: int, batch: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_equal_seeds_give_equal_parameters_and_other_seeds_others() -> None:
    first, again, other = model(1).state_dict(), model(1).state_dict(), model(2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_initialising_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model(1).initialise(torch.Generator().manual_seed(9))
    torch.set_rng_state(before)
    assert torch.equal(torch.rand(3), expected)


def test_an_untrained_model_knows_nothing_about_the_next_byte() -> None:
    loss = model(config=GPTConfig()).loss(rows(1, length=128), rows(2, length=128))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_logits_have_one_row_per_byte() -> None:
    assert model()(rows(0, batch=2, length=7)).shape == (2, 7, 256)


def test_no_position_sees_what_comes_after_it() -> None:
    subject, text = model(), rows(3, batch=1)
    changed = text.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % 256
    before, after = subject(text), subject(changed)
    assert torch.allclose(before[0, :6], after[0, :6], atol=1e-6)
    assert not torch.allclose(before[0, 6:], after[0, 6:], atol=1e-6)


def test_the_loss_is_the_mean_negative_log_chance_of_the_targets() -> None:
    subject, inputs, targets = model(), rows(4), rows(5)
    chances = subject(inputs).double().softmax(-1).gather(-1, targets.unsqueeze(-1))
    assert subject.loss(inputs, targets).item() == pytest.approx(-chances.log().mean().item(), rel=1e-5)


def test_every_parameter_is_a_matrix_that_receives_a_gradient() -> None:
    subject = model()
    subject.loss(rows(6), rows(7)).backward()
    for name, parameter in subject.named_parameters():
        assert parameter.dim() == 2, name
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_the_state_holds_parameters_alone() -> None:
    subject = model()
    assert set(subject.state_dict()) == {name for name, _ in subject.named_parameters()}


def test_rotation_keeps_norms_and_makes_products_depend_on_distance_alone() -> None:
    cosine, sine = rotary_tables(context=10, head_width=8)
    query, key = torch.randn(8, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)
    queries = rotate(query.expand(1, 1, 10, 8), cosine, sine)[0, 0]
    keys = rotate(key.expand(1, 1, 10, 8), cosine, sine)[0, 0]
    assert torch.allclose(queries.norm(dim=-1), query.norm().expand(10), atol=1e-5)
    assert torch.allclose(queries[3] @ keys[1], queries[9] @ keys[7], atol=1e-4)
    assert not torch.allclose(queries[3] @ keys[1], queries[3] @ keys[2], atol=1e-2)


def test_a_few_steps_learn_a_repeating_text() -> None:
    subject = model(config=GPTConfig(layers=1, width=32, heads=2, context=8))
    text = torch.tensor(list(b"abcdefgh" * 3))
    batch = torch.stack([text[start : start + 9] for start in range(8)])
    optimizer = torch.optim.AdamW(subject.parameters(), lr=1e-2)
    for _ in range(40):
        loss = subject.loss(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert subject.loss(batch[:, :-1], batch[:, 1:]).item() < 0.5
    assert subject.generate(b"abc", 5, temperature=0) == b"defgh"


def test_sampling_repeats_with_a_seed_and_sees_prompts_longer_than_the_context() -> None:
    subject, prompt = model(), bytes(range(40))
    drawn = [subject.generate(prompt, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 20


def test_an_empty_prompt_is_continued() -> None:
    assert len(model().generate(b"", 4, generator=torch.Generator().manual_seed(0))) == 4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layers": 0}, "layers"),
        ({"context": -1}, "context"),
        ({"width": 20, "heads": 3}, "width"),
        ({"width": 6, "heads": 2}, "width"),
    ],
)
def test_shapes_that_no_model_has_are_refused(fields: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} = "):
        GPTConfig(**fields)
