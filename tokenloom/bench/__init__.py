"""``tokenloom bench``: cases.py says what is measured, traffic.py how many bytes that moves, comm.py measures."""
