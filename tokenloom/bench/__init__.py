"""``tokenloom bench``: what is measured (cases.py, series.py), how (inputs.py, comm.py, timing.py, peers.py), over how
many bytes (traffic.py), and how it is told (setup.py, rows.py, plot.py). run.py puts them together."""
