"""What `fit`, `evaluate` and `predict` do for a replicated model.

`step` makes the functions that Keras' loops call once a batch. `gradients`,
`losses`, `statistics` and `randomness` are the places where the replicas of a
step meet or differ. `hooks` ties them to Keras.
"""
