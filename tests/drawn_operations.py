"""Operations that drawn programs are put together from, as source text.

A template is asked with what has been drawn so far, and returns an expression,
or raises `LookupError` where nothing fits. It writes `n` for the number of
samples. Whether an expression can be computed is found out by computing it.
"""

# Of each sample by itself; the samples are along the first axis of `rows`.
APART = [
    *(
        lambda d, f=f: f"{f}({d.real()})"
        for f in (
            *("tf.tanh", "tf.nn.softplus", "tf.abs", "ops.square", "tf.sin"),
            *("ops.sigmoid", "tf.nn.relu", "tf.sign", "tf.ones_like"),
            *("tf.stop_gradient", "tf.identity", "tf.negative"),
        )
    ),
    lambda d: f"tf.exp(-({d.real()} ** 2))",
    lambda d: f"tf.sqrt(0.1 + {d.real()} ** 2)",
    lambda d: f"1 / (2 + tf.tanh({d.real()}))",
    lambda d: f"tf.clip_by_value({d.real()}, -0.5, 0.8)",
    lambda d: f"{d.real()} > {d.of(['0.1', '-0.3', '0.6'])}",
    lambda d: f"tf.cast({d.discrete()}, 'float64')",
    lambda d: f"tf.cast({d.discrete()}, 'int32') % {d.of([2, 3])}",
    lambda d: f"~{d.truth()}",
    *(
        lambda d, f=f: f.format(d.real(), d.real())
        for f in (
            *("{} + {}", "{} * {}", "{} - {}", "{} / (1.5 + tf.tanh({}))"),
            *("tf.maximum({}, {})", "ops.minimum({}, {})", "{} > {}"),
            "tf.math.squared_difference({}, {})",
            "tf.math.divide_no_nan({}, 0.5 + ops.abs({}))",
        )
    ),
    lambda d: f"tf.where({d.truth()}, {d.real()}, {d.real()})",
    lambda d: f"ops.where({d.truth()}, {d.real()}, 0.2)",
    lambda d: f"{d.real()} * tf.cast({d.truth()}, 'float64')",
    *(
        lambda d, f=f: f"{f}({(x := d.rows())}, {d.inner(x)}{d.kept()})"
        for f in (
            *("tf.reduce_sum", "tf.reduce_mean", "ops.max", "tf.reduce_min"),
            *("tf.math.reduce_std", "tf.reduce_logsumexp", "ops.prod"),
            *("ops.var", "ops.sum", "ops.mean"),
        )
    ),
    *(
        lambda d, f=f: f"{f}({(x := d.rows())}, {d.inner(x)})"
        for f in (
            *("tf.nn.softmax", "tf.nn.log_softmax", "tf.math.l2_normalize"),
            *("tf.cumsum", "tf.sort", "tf.argsort", "ops.flip", "ops.sort"),
            *("ops.argmax", "tf.argmin", "ops.softmax", "ops.cumsum"),
        )
    ),
    lambda d: f"tf.nn.top_k({d.rows(2)}, 2).{d.of(['values', 'indices'])}",
    lambda d: f"tf.concat([{(x := d.rows())}, {d.rows()}], {d.inner(x)})",
    lambda d: f"ops.stack([{(x := d.rows())}, {d.rows()}], {x.rank})",
    lambda d: f"tf.stack([{(x := d.rows())}, {x} ** 2], 1)",
    lambda d: f"tf.repeat({(x := d.rows())}, 2, axis={d.inner(x)})",
    lambda d: f"tf.tile({(x := d.rows())}, [1, 2{', 1' * (x.rank - 2)}])",
    lambda d: f"tf.reshape({d.rows()}, [n, -1])",
    lambda d: f"ops.reshape({d.rows()}, (-1, {d.of([1, 2, 3, 4])}))",
    lambda d: f"tf.transpose({d.real(2)})",
    lambda d: f"tf.transpose({d.rows(3)}, [0, 2, 1])",
    lambda d: f"tf.roll({(x := d.rows())}, 1, {d.inner(x)})",
    lambda d: f"tf.reverse({(x := d.rows())}, [{d.inner(x)}])",
    lambda d: f"tf.gather({(x := d.rows())}, [1, 0], axis={d.inner(x)})",
    lambda d: f"{d.rows()}[:, {d.of(['0', '-1', '1:', '::2', 'None'])}]",
    lambda d: f"{d.rows()}[..., None]",
    lambda d: (
        f"tf.pad({(x := d.rows())}, "
        f"[[0, 0], [1, 0]{', [0, 0]' * (x.rank - 2)}])"
    ),
    lambda d: (
        f"tf.gather_nd({d.rows()}, tf.stack([{d.places()}, {d.choice()}], 1))"
    ),
    lambda d: f"tf.gather_nd({d.rows()}, {d.choice()}[:, None], batch_dims=1)",
    lambda d: f"tf.gather({d.rows()}, {d.choice()}, axis=1, batch_dims=1)",
    lambda d: (
        f"ops.take_along_axis({(x := d.rows())}, "
        f"tf.argsort({x}, {(axis := d.inner(x))}), {axis})"
    ),
    lambda d: f"ops.take_along_axis({d.rows()}, {d.choice()}[:, None], 1)",
    lambda d: f"tf.one_hot({d.choice()}, {d.of([3, 4])}, dtype='float64')",
    lambda d: f"ops.one_hot({d.integer()}, {d.of([3, 4])}, dtype='float64')",
    lambda d: f"tf.gather(TABLE, {d.choice()})",
    lambda d: f"tf.gather(TABLE, {d.integer()} % 3)",
    lambda d: f"tf.matmul({(x := d.rows())}, TABLE[:{x.size(-1)}])",
    lambda d: (
        f"tf.einsum('ij,kj->ik', {(x := d.rows())}, TABLE[:, :{x.size(-1)}])"
    ),
    lambda d: f"tf.einsum('ij,ij->i', {d.rows()}, {d.rows()})",
    lambda d: f"ops.einsum('ij,ik->ijk', {d.rows()}, {d.rows()})",
    lambda d: f"tf.matmul({d.rows(3)}, {d.rows(3)}, transpose_b=True)",
    lambda d: f"{d.rows()}[:, None] * {d.rows()}[:, :, None]",
    lambda d: (
        f"tf.map_fn(lambda row: tf.tanh(row) * tf.reduce_sum(row), {d.rows()})"
    ),
    lambda d: f"tf.vectorized_map(lambda row: tf.nn.softmax(row), {d.rows()})",
    lambda d: (
        f"tf.while_loop(lambda i, z: i < 2, lambda i, z: "
        f"(i + 1, tf.sin(z) + {(x := d.rows())}), (0, {x}))[1]"
    ),
    lambda d: (
        f"tf.cond(tf.reduce_sum(TABLE) > 0, "
        f"lambda: {(x := d.rows())} * 2, lambda: {x})"
    ),
    lambda d: (
        f"tf.split(tf.concat([{d.rows()}, {d.rows()}], 0), 2)[{d.of([0, 1])}]"
    ),
    lambda d: (
        f"tf.math.unsorted_segment_sum(tf.repeat({d.rows()}, 2, 0), "
        f"tf.repeat({d.places()}, 2), n)"
    ),
    lambda d: (
        f"tf.tensor_scatter_nd_update({(x := d.rows())}, "
        f"tf.where({(m := d.mask())}), 2 * tf.boolean_mask({x}, {m}))"
    ),
    lambda d: (
        f"tf.tensor_scatter_nd_add({d.rows()}, "
        f"{d.places()}[:, None], {d.rows()})"
    ),
    lambda d: (
        f"tf.scatter_nd(tf.stack([{d.places()}, {d.choice()}], 1), "
        f"{d.row_numbers()}, [n, 4])"
    ),
    lambda d: (
        f"tf.scatter_nd({d.places()}[:, None], {(x := d.rows())}, "
        f"tf.shape({x}))"
    ),
    lambda d: f"tf.gather({d.rows()}, {d.places()})",
    lambda d: (
        f"tf.dynamic_stitch(tf.dynamic_partition({d.places()}, "
        f"(c := {d.choice()} % 2), 2), tf.dynamic_partition({d.rows()}, c, 2))"
    ),
]

# What depends on all samples or on where they are.
MIXING = [
    *(
        lambda d, f=f: f"{f}({d.rows(1)}, {d.of(['0', '0', 'None'])}{d.kept()})"
        for f in (
            *("tf.reduce_sum", "tf.reduce_mean", "ops.max", "tf.reduce_min"),
            *("tf.math.reduce_std", "tf.reduce_logsumexp", "ops.prod"),
            *("ops.var", "ops.mean", "ops.sum", "tf.reduce_mean", "ops.std"),
        )
    ),
    *(
        lambda d, f=f: f"{f}({d.rows(1)}, {d.of(['0', '0', 'axis=0'])})"
        for f in (
            *("tf.nn.softmax", "tf.nn.log_softmax", "tf.math.l2_normalize"),
            *("tf.cumsum", "tf.sort", "tf.argsort", "ops.flip", "ops.argmax"),
            *("ops.softmax", "tf.argmax", "ops.cumsum", "ops.sort"),
        )
    ),
    *(
        lambda d, f=f: f.format(d.rows(1))
        for f in (
            *("{}[:1]", "{}[0]", "{}[-1:]", "{}[::-1]", "{}[1:]", "{}[:3]"),
            *("tf.roll({}, 1, 0)", "tf.norm({}, axis=0)", "ops.norm({})"),
            *("{}[::2]", "tf.reverse({}, [0])", "{}[:n // 2]"),
            *("tf.reshape({}, [1, -1])", "ops.median({}, axis=0)"),
            *("tf.nn.moments({}, [0])[1]", "tf.scan(tf.add, {})"),
            "tf.pad({}, [[1, 0]] + [[0, 0]] * {}.shape.rank)[:-1]",
        )
    ),
    lambda d: f"tf.gather({(x := d.rows(2))}, tf.argsort({x}[:, 0]))",
    lambda d: f"tf.gather({d.rows(1)}, tf.argsort({d.row_numbers()}))",
    lambda d: f"tf.argsort(tf.argsort({d.row_numbers()}))",
    lambda d: (
        f"tf.nn.top_k({d.row_numbers()}, 3).{d.of(['values', 'indices'])}"
    ),
    lambda d: (
        f"tf.gather({d.rows(1)}, tf.nn.top_k({d.row_numbers()}, n).indices)"
    ),
    lambda d: f"tf.gather({d.rows(1)}, n - 1 - {d.places()})",
    lambda d: f"tf.gather({d.rows(1)}, ({d.places()} + 1) % n)",
    lambda d: f"tf.gather({d.rows(1)}, {d.choice()})",
    lambda d: f"tf.gather_nd({d.rows(1)}, [[0], [2]])",
    lambda d: f"tf.cast({d.places()}, 'float64')",
    lambda d: f"tf.cast({d.places()}, 'float64') / tf.cast(n, 'float64')",
    lambda d: f"{d.places()} % 3",
    lambda d: f"ops.one_hot({d.places()} % 4, 4, dtype='float64')",
    lambda d: "tf.eye(n, dtype='float64')",
    lambda d: f"tf.cast({d.of(['n', 'ops.shape(y)[0]'])}, 'float64')",
    lambda d: f"{d.real()} / tf.cast(n, 'float64')",
    lambda d: "tf.ones([n, n], 'float64') / tf.cast(n, 'float64')",
    lambda d: f"tf.matmul({d.rows()}, {d.rows()}, transpose_b=True)",
    lambda d: f"tf.matmul({d.rows()}, {d.rows()}, transpose_a=True)",
    lambda d: f"tf.einsum('bi,bj->ij', {d.rows()}, {d.rows()})",
    lambda d: f"ops.einsum('bi,ci->bc', {d.rows()}, {d.rows()})",
    lambda d: f"tf.einsum('bi,ci->b', {d.rows()}, {d.rows()})",
    lambda d: f"{(x := d.rows())}[:, None] - {x}[None]",
    lambda d: f"tf.tensordot({d.row_numbers()}, {d.rows(1)}, 1)",
    lambda d: (
        f"tf.math.unsorted_segment_{d.of(['sum', 'mean', 'max'])}"
        f"({d.rows(1)}, {d.choice()}, 3)"
    ),
    lambda d: f"tf.math.segment_sum({d.rows(1)}, {d.places()} // 2)",
    lambda d: (
        f"tf.scatter_nd({d.choice()}[:, None], {(x := d.rows(1))}, "
        f"tf.concat([[3], tf.shape({x})[1:]], 0))"
    ),
    lambda d: f"tf.tensor_scatter_nd_add({(x := d.rows(1))}, [[0]], {x}[-1:])",
    lambda d: (
        f"tf.tensor_scatter_nd_update({(x := d.rows(1))}, "
        f"{d.places()}[::2, None], 0 * {x}[::2])"
    ),
    lambda d: f"tf.math.bincount({d.choice()}, minlength=3)",
    lambda d: f"tf.boolean_mask({d.rows(1)}, {d.mask()})",
    lambda d: f"tf.unique({d.choice()})[{d.of([0, 1])}]",
    lambda d: f"tf.where({d.mask()})[:, 0]",
    lambda d: f"tf.reduce_all({d.mask()})",
    lambda d: f"tf.math.cumulative_logsumexp({d.row_numbers()})",
    lambda d: (
        f"tf.linalg.band_part(tf.einsum('bi,ci->bc', "
        f"{(x := d.rows())}, {x}), -1, 0)"
    ),
    lambda d: (
        f"tf.cond(tf.reduce_mean({(x := d.rows(1))}) > 0.02, "
        f"lambda: {x} * 2, lambda: -{x})"
    ),
    lambda d: (
        f"tf.map_fn(lambda row: tf.reduce_sum(row * {(x := d.rows())}, 0), {x})"
    ),
    lambda d: f"tf.concat([{d.rows(1)}, {d.rows(1)}], 0)",
    lambda d: f"tf.concat([{d.rows(1)}, {d.rows(1)}[::-1]], 0)",
]

# What follows a statistic: it comes back to the samples, or is reduced more.
ANY = [
    *(
        lambda d, f=f: f"{f}({(x := d.real(1))}, {d.axis(x)}{d.kept()})"
        for f in (
            *("tf.reduce_sum", "tf.reduce_mean", "ops.max", "ops.min"),
            *("tf.math.reduce_std", "tf.reduce_logsumexp", "ops.prod"),
        )
    ),
    *(
        lambda d, f=f: f"{f}({(x := d.real(1))}, {d.axis(x)})"
        for f in (
            *("tf.nn.softmax", "ops.log_softmax", "tf.cumsum", "tf.sort"),
            *("tf.argsort", "tf.math.l2_normalize", "ops.flip", "ops.argmax"),
        )
    ),
    *(
        lambda d, f=f: f.format(d.real(), d.real())
        for f in (
            *("{} + {}", "{} * {}", "{} - {}", "{} / (1.5 + tf.tanh({}))"),
            *("tf.maximum({}, {})", "{} > {}", "tf.where({1} > 0, {0}, {1})"),
            *("tf.matmul({}, {})", "tf.matmul({}, {}, transpose_b=True)"),
            *("tf.tensordot({}, {}, 1)", "tf.einsum('ij,j->i', {}, {})"),
            *("tf.einsum('ij,i->j', {}, {})", "{}[:, None] - {}[None]"),
            "tf.cond(tf.reduce_sum({0}) > 0, lambda: {1} * 2, lambda: {1})",
            "tf.map_fn(lambda row: row * {}, {})",
        )
    ),
    lambda d: f"tf.tile({(x := d.real(1))}[None], [n{', 1' * x.rank}])",
    lambda d: f"tf.tile({(x := d.real(1))}, [n{', 1' * (x.rank - 1)}])",
    lambda d: f"tf.repeat({d.real(1)}, n, axis=0)",
    lambda d: f"tf.broadcast_to({d.real()}, tf.shape({d.rows()}))",
    lambda d: f"tf.broadcast_to({d.real()}, [n, 3])",
    lambda d: f"tf.fill([n, {d.of([1, 2])}], {d.scalar()})",
    lambda d: f"tf.fill([n], {d.scalar()})",
    lambda d: f"tf.concat([{(x := d.real(1))}, {d.real(1)}], {d.axis(x)})",
    lambda d: (
        f"tf.stack([{(x := d.real())}, {d.real()}], {d.of(range(x.rank + 1))})"
    ),
    lambda d: f"tf.reshape({d.real()}, {d.of(['[-1]', '[-1, 1]', '[1, -1]'])})",
    lambda d: f"tf.reshape({d.real(1)}, [{d.of(['n, -1', '-1, 3', '-1, n'])}])",
    lambda d: f"tf.transpose({d.real(2)})",
    lambda d: f"tf.gather({d.real(1)}, {d.integer()})",
    lambda d: f"tf.gather({(x := d.real(1))}, [1, 0], axis={d.axis(x)})",
    lambda d: f"tf.gather({d.real(1)}, {d.choice()})",
    lambda d: f"tf.gather({d.rows(1)}, {d.integer()} % n)",
    lambda d: f"{d.real(1)}[{d.of(['0', '-1', '1:', ':1', '::-1', 'None'])}]",
    lambda d: f"{d.real(2)}[:, {d.of(['0', '-1', ':1', '::-1', 'None'])}]",
    lambda d: f"tf.cast({d.discrete()}, 'float64')",
    lambda d: (
        f"tf.one_hot({d.integer()}, {d.of(['3', '4', 'n'])}, dtype='float64')"
    ),
    lambda d: f"{d.integer()} % {d.of([2, 3])}",
    lambda d: f"{d.integer()} + {d.integer()}",
    lambda d: f"{d.real()} * tf.cast({d.discrete()}, 'float64')",
    lambda d: f"tf.where({d.truth()}, {d.real()}, {d.real()})",
    lambda d: f"{d.real()} / tf.cast(n, 'float64')",
    lambda d: f"tf.linalg.diag_part({d.real(2)})",
    lambda d: f"tf.linalg.trace({d.real(2)})",
    lambda d: (
        f"tf.linalg.set_diag({(x := d.real(2))}, 0 * tf.linalg.diag_part({x}))"
    ),
]

# How a value comes to have one row, of some numbers, for each sample.
ROWS = [
    lambda d, x: f"{x}",
    lambda d, x: f"{d.rows()} + {x}",
    lambda d, x: f"{d.rows()} * {x}",
    lambda d, x: f"{d.rows()} - tf.reshape({x}, [n, -1])",
    lambda d, x: f"tf.concat([{d.rows()}, {x}], -1)",
    lambda d, x: f"tf.concat([{d.rows()}, {x}[:, None]], -1)",
    lambda d, x: f"tf.concat([{d.rows()}, tf.tile({x}[None], [n, 1])], 1)",
    lambda d, x: f"tf.concat([{d.rows()}, tf.fill([n, 1], {x})], 1)",
    lambda d, x: f"{d.rows()} * {x}[:, None]",
    lambda d, x: f"{d.rows()} + {x}[None]",
    lambda d, x: f"tf.matmul({x}, {d.rows()})",
    lambda d, x: f"tf.gather({d.rows()}, {x})",
    lambda d, x: f"{d.rows()} * tf.reduce_mean({x})",
    lambda d, x: f"{d.rows()} + 0.1 * tf.cast({x}, 'float64')",
    lambda d, x: f"{d.rows()} * tf.cast({x}, 'float64')[:, None]",
    lambda d, x: f"tf.where({x}, {d.rows()}, 0.3)",
    lambda d, x: f"tf.where({x}[:, None], {d.rows()}, 0.3)",
    lambda d, x: f"tf.one_hot({x}, 3, dtype='float64')",
    lambda d, x: f"tf.reshape({x}, [n, -1])",
    lambda d, x: f"{x}[:, :, 0]",
]

# How a value comes to be one number, of values that are rows or not.
NUMBER = [
    lambda d, x: f"tf.reduce_mean({x})",
    lambda d, x: f"tf.reduce_sum({x})",
    lambda d, x: f"ops.mean({x})",
    lambda d, x: f"tf.reduce_sum({x}) / tf.cast(n, 'float64')",
    lambda d, x: f"{x}",
    lambda d, x: f"tf.reduce_mean(tf.cast({x}, 'float64'))",
    lambda d, x: f"tf.reduce_mean({d.rows()} * {x})",
    lambda d, x: f"tf.reduce_mean({d.row_numbers()} * tf.cast({x}, 'float64'))",
    lambda d, x: f"tf.reduce_mean(tf.gather({d.rows(1)}, {x}))",
]
NUMBER_OF_ALL = [
    lambda d, x: f"tf.sqrt(0.1 + tf.reduce_mean({x} ** 2))",
    lambda d, x: f"tf.reduce_mean({x} ** 2) / (0.1 + tf.reduce_mean(y ** 2))",
    lambda d, x: f"tf.reduce_max({x})",
    lambda d, x: f"tf.math.reduce_variance({x})",
]
