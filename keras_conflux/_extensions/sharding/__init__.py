"""The state of optimizers, and weights, in parts: `shard=`."""
