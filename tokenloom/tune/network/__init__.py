"""Cost of dispatch and combine between nodes: rows on the wire, a model of their time, and published figures."""
