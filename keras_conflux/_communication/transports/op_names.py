"""How the ops of a collective are spelled in TensorFlow."""

MERGE_OPS = {"sum": "Add", "product": "Mul", "min": "Min", "max": "Max"}
"""In `CollectiveReduceV2` and `XlaAllReduce`."""

NCCL_OPS = {"sum": "sum", "product": "prod", "min": "min", "max": "max"}
"""In `NcclAllReduce`."""
