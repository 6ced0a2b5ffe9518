"""A seeded world in which the real state machines meet: no clock, no socket, no thread, every fault by number."""
