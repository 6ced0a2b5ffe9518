"""What share of a fleet's time is spent training: simulated before the machines are rented."""
