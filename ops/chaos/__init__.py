"""Faults on purpose: plans of them, what injects them, and the checker that says whether anything was lost."""
