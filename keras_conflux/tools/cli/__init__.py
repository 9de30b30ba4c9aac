"""The command `keras-conflux`, with one file per subcommand.

Nothing here makes a tensor: the GPUs belong to the processes that are started.
"""
