"""Names inside of Keras and TensorFlow that tell what a step needs."""

from keras_conflux._compat.private_names import PrivateName

NAMES = (
    PrivateName("tensorflow.compiler.xla.service.hlo_pb2:HloProto"),
    PrivateName(
        "keras.src.trainers.compile_utils:CompileLoss.__init__",
        "self, loss, loss_weights, reduction, output_names",
        ("_user_loss", "_user_loss_weights", "output_names", "reduction"),
    ),
    PrivateName(
        "keras.src.trainers.trainer:Trainer.compute_loss",
        "self, x, y, y_pred, sample_weight, training",
        ("_compile_loss",),
    ),
)
