"""The tests' oracle: Algorithm 1 of the paper as plain loops over samples, nodes and leaves.

Slow and obviously right. It shares no code with the package and never imports it. All arithmetic is in Python floats,
that is in float64; tensors come in and go out, nothing else. Written from the paper and from the definitions alone.

`state` is a dict of float64 tensors. Node i has the children 2i+1 (left) and 2i+2 (right); leaf j is number nodes + j
of the same heap, so that one recursion reaches both.

    node_weight      (nodes, in)       or, for node width n > 1, (nodes, n, in)
    node_bias        (nodes,)          or (nodes, n)
    node_out_weight  (nodes, n)        node_out_bias (nodes,); only for n > 1
    leaf_in_weight   (leaves, l, in)   leaf_in_bias (leaves, l) or None
    leaf_gate_weight (leaves, l, in)   leaf_gate_bias (leaves, l) or None; only for gated ones
    leaf_out_weight  (leaves, l, out)  leaf_out_bias (leaves, out) or None

The second half is the noisy top-k gate of Shazeer et al. (2017), section 2.1 and appendix A, in the same manner.
Whatever is undefined (a mean over no samples, log 0, 0 / 0) raises, rather than having a value invented for it here.
"""

import math

import torch


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def normal_cdf(z):
    return math.erfc(-z / math.sqrt(2)) / 2


ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": lambda z: max(z, 0.0),
    "tanh": math.tanh,
    "silu": lambda z: z * sigmoid(z),
    "gelu": lambda z: z * normal_cdf(z),
    "gelu_tanh": lambda z: z / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def dot(a, b):
    return sum((u * v for u, v in zip(a, b, strict=True)), 0.0)


def affine(weight, bias, x):
    """W x + b, one entry per row of the weight; a bias of None is zero."""
    return [dot(row, x) + (0.0 if bias is None else bias[r]) for r, row in enumerate(weight)]


def to_tensor(rows, *shape):
    return torch.tensor(rows, dtype=torch.float64).reshape(shape)


class Tree:
    """The state as nested lists, with the networks of the paper (node logits, choices, leaves) for one sample."""

    def __init__(self, state, activation, temperature=1.0):
        self.state = {name: None if value is None else value.tolist() for name, value in state.items()}
        self.leaves, _, self.out = state["leaf_out_weight"].shape
        self.nodes = self.leaves - 1
        self.gated = activation in GATED
        self.act = ACTIVATIONS[GATED.get(activation, activation)]
        self.temperature = temperature

    def logit(self, x, i):
        s = self.state
        if s.get("node_out_weight") is None:
            return dot(s["node_weight"][i], x) + s["node_bias"][i]
        hidden = [self.act(z) for z in affine(s["node_weight"][i], s["node_bias"][i], x)]
        return dot(s["node_out_weight"][i], hidden) + s["node_out_bias"][i]

    def choice(self, x, i):
        """(weight of the left child, weight of the right child); sigmoid(-z) is 1 - sigmoid(z) without the rounding."""
        z = self.temperature * self.logit(x, i)
        return sigmoid(-z), sigmoid(z)

    def leaf(self, x, j):
        def part(name):
            value = self.state.get(name)
            return None if value is None else value[j]

        hidden = affine(part("leaf_in_weight"), part("leaf_in_bias"), x)
        if self.gated:
            gate = affine(part("leaf_gate_weight"), part("leaf_gate_bias"), x)
            hidden = [self.act(g) * h for g, h in zip(gate, hidden, strict=True)]
        else:
            hidden = [self.act(h) for h in hidden]
        columns = zip(*part("leaf_out_weight"), strict=True)
        return affine(columns, part("leaf_out_bias"), hidden)

    def forward_t(self, x, i=0):
        if i >= self.nodes:
            return self.leaf(x, i - self.nodes)
        left, right = self.choice(x, i)
        pairs = zip(self.forward_t(x, 2 * i + 1), self.forward_t(x, 2 * i + 2), strict=True)
        return [left * a + right * b for a, b in pairs]

    def kept(self, x, least, i=0, probability=1.0):
        """{leaf: soft weight}, for the leaves below i with at least this weight."""
        if i >= self.nodes:
            return {i - self.nodes: probability} if probability >= least else {}
        left, right = self.choice(x, i)
        below = self.kept(x, least, 2 * i + 1, probability * left)
        return below | self.kept(x, least, 2 * i + 2, probability * right)

    def forward_shed(self, x, epsilon):
        """The mean output of the leaves that weigh at least epsilon / leaves, by their weights."""
        kept = self.kept(x, epsilon / self.leaves)
        outputs = {j: self.leaf(x, j) for j in kept}
        return [sum(c * outputs[j][k] for j, c in kept.items()) / sum(kept.values()) for k in range(self.out)]

    def forward_i(self, x, i=0):
        if i >= self.nodes:
            return self.leaf(x, i - self.nodes)
        return self.forward_i(x, 2 * i + 2 if self.logit(x, i) >= 0 else 2 * i + 1)

    def reach(self, x, i=0, probability=1.0):
        """{heap number: soft probability that x reaches it}, for the nodes and leaves of the subtree at i."""
        reached = {i: probability}
        if i < self.nodes:
            left, right = self.choice(x, i)
            reached |= self.reach(x, 2 * i + 1, probability * left)
            reached |= self.reach(x, 2 * i + 2, probability * right)
        return reached

    def path(self, x, i=0):
        """[heap numbers that the hard pass visits from i on], the leaf last."""
        if i >= self.nodes:
            return [i]
        return [i, *self.path(x, 2 * i + 2 if self.logit(x, i) >= 0 else 2 * i + 1)]


def entropy(left, right):
    """Of a Bernoulli choice, in nats: 0 where either probability rounds to 1."""
    if left == 1 or right == 1:
        return 0.0
    small = min(left, right)
    return -small * math.log(small) - (1 - small) * math.log1p(-small)


def node_logits(x, state, activation):
    tree = Tree(state, activation)
    return to_tensor([[tree.logit(s, i) for i in range(tree.nodes)] for s in x.tolist()], len(x), tree.nodes)


def mixture(x, state, activation, temperature=1.0):
    tree = Tree(state, activation, temperature)
    reached = [tree.reach(s) for s in x.tolist()]
    return to_tensor([[r[tree.nodes + j] for j in range(tree.leaves)] for r in reached], len(x), tree.leaves)


def forward_t(x, state, activation, temperature=1.0):
    tree = Tree(state, activation, temperature)
    return to_tensor([tree.forward_t(s) for s in x.tolist()], len(x), tree.out)


def forward_shed(x, state, activation, epsilon, temperature=1.0):
    tree = Tree(state, activation, temperature)
    return to_tensor([tree.forward_shed(s, epsilon) for s in x.tolist()], len(x), tree.out)


def forward_i(x, state, activation):
    tree = Tree(state, activation)
    return to_tensor([tree.forward_i(s) for s in x.tolist()], len(x), tree.out)


def route(x, state, activation):
    tree = Tree(state, activation)
    return torch.tensor([tree.path(s)[-1] - tree.nodes for s in x.tolist()], dtype=torch.int64)


def entropies(x, state, activation, temperature=1.0):
    tree = Tree(state, activation, temperature)
    means = [sum(entropy(*tree.choice(s, i)) for s in x.tolist()) / len(x) for i in range(tree.nodes)]
    return to_tensor(means, tree.nodes)


def hardening_loss(x, state, activation, reduction, temperature=1.0):
    """sum: the paper's, over batch and nodes. mean: over both. path: batch mean of sum_i P_i(x) H(p_i(x))."""
    if reduction not in ("sum", "mean", "path"):
        raise ValueError(f"reduction is 'sum', 'mean' or 'path'; got {reduction!r}")
    tree = Tree(state, activation, temperature)
    if tree.nodes == 0:
        return 0.0
    total = 0.0
    for s in x.tolist():
        reached = tree.reach(s)
        for i in range(tree.nodes):
            total += (reached[i] if reduction == "path" else 1.0) * entropy(*tree.choice(s, i))
    return total / {"sum": 1, "mean": len(x) * tree.nodes, "path": len(x)}[reduction]


def balance_loss(x, state, activation, kind, temperature=1.0):
    """node: sum_i -2^-level (log a_i + log(1 - a_i)) / 2, a_i the share of node i's soft mass that goes right.
    leaf: leaves * sum_j f_j m_j, f_j the fraction of hard visits to leaf j and m_j its mean soft weight."""
    if kind not in ("node", "leaf"):
        raise ValueError(f"kind is 'node' or 'leaf'; got {kind!r}")
    tree = Tree(state, activation, temperature)
    used = {name: value.tolist() for name, value in usage(x, state, activation, temperature).items()}
    if kind == "leaf":
        return tree.leaves * dot([c / len(x) for c in used["leaf_count"]], [m / len(x) for m in used["leaf_mass"]])
    mass = used["node_mass"] + used["leaf_mass"]
    loss = 0.0
    for i in range(tree.nodes):
        level = int(math.log2(i + 1))
        # The children's masses are sum_x P_i (1 - p_i) and sum_x P_i p_i.
        go_left, go_right = mass[2 * i + 1] / mass[i], mass[2 * i + 2] / mass[i]
        loss += -(2.0**-level) * (math.log(go_right) + math.log(go_left)) / 2
    return loss


def usage(x, state, activation, temperature=1.0):
    """Batch sums: the soft probability of reaching (mass), and the hard visits to (count), each leaf and node."""
    tree = Tree(state, activation, temperature)
    mass, count = [0.0] * (tree.nodes + tree.leaves), [0.0] * (tree.nodes + tree.leaves)
    for s in x.tolist():
        for i, probability in tree.reach(s).items():
            mass[i] += probability
        for i in tree.path(s):
            count[i] += 1
    return {
        "leaf_mass": to_tensor(mass[tree.nodes :], tree.leaves),
        "leaf_count": to_tensor(count[tree.nodes :], tree.leaves),
        "node_mass": to_tensor(mass[: tree.nodes], tree.nodes),
        "node_count": to_tensor(count[: tree.nodes], tree.nodes),
    }


# The noisy top-k gate. clean = x W_g, noise_std = softplus(x W_noise) and noise ~ N(0, 1) are all (batch, experts).


def moe_noisy(clean, noise_std, noise):
    rows = zip(clean.tolist(), noise_std.tolist(), noise.tolist(), strict=True)
    return [[c + e * s for c, s, e in zip(*row, strict=True)] for row in rows]


def moe_gates(clean, noise_std, noise, k):
    """Softmax over the k largest noisy logits of each sample, 0 elsewhere; of equals the first is kept."""
    gates = []
    for h in moe_noisy(clean, noise_std, noise):
        kept = sorted(range(len(h)), key=lambda i: -h[i])[:k]
        weight = {i: math.exp(h[i] - h[kept[0]]) for i in kept}
        gates.append([weight.get(i, 0.0) / sum(weight.values()) for i in range(len(h))])
    return to_tensor(gates, *clean.shape)


def moe_load(clean, noise_std, noise, k):
    """Sum over the batch of P(expert i stays in the top k when its noise alone is drawn again)."""
    experts = clean.shape[1]
    load = [0.0] * experts
    for b, h in enumerate(moe_noisy(clean, noise_std, noise)):
        for i in range(experts):
            others = sorted(h[:i] + h[i + 1 :], reverse=True)
            if k > len(others):
                load[i] += 1.0
            else:
                load[i] += normal_cdf((clean[b, i].item() - others[k - 1]) / noise_std[b, i].item())
    return to_tensor(load, experts)


def cv_squared(values):
    """Squared coefficient of variation: population variance over squared mean."""
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values) / mean**2


def moe_importance_loss(gates):
    return cv_squared([sum(column) for column in zip(*gates.tolist(), strict=True)])


def moe_load_loss(load):
    return cv_squared(load.tolist())
