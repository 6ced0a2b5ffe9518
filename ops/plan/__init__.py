"""What a run takes of links, memory, disk and money: computed before the machines are rented."""
