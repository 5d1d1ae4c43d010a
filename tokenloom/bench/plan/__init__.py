"""``tokenloom plan``: the tables, the file and the chart of the cost model in tune/network."""
