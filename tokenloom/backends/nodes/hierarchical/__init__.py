"""Calls between nodes by collectives, in two hops: a token travels once for each node, and is forwarded there."""
