"""The measuring harness behind `tile-ep bench`.

A `Workload` makes the inputs, `Ranks` runs calls on all ranks and takes the time, systems (`exchange`, `peers`) say what is
called and what comes out, `session` puts it together, `report` and `plots` show it.
"""
