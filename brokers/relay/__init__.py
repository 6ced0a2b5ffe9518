"""A relay: the broker of one region, through which each payload crosses the way to the home broker once."""
