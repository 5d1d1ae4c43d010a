"""``tokenloom bench comm``: dispatch and combine, as a user calls them, over every backend."""
