"""What dispatch and combine cost between nodes: rows on the wire, a model of their time, and published figures."""
