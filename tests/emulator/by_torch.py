"""What clusters.cu and few_tiles.cu compute, by torch: the same operations in the same order, so the same bits."""

import ctypes

import torch

# Places in a row of kernels/tables.py.
_FIELDS = {"grad": 0, "param": 2, "row stride": 7, "rows": 9, "cols": 10, "turned": 15, "scale": 16}
_BOX, _PART = 64, 16


def quick_sums(a, b):
    """A·Bᵀ in fp32, in any order."""
    return a.float() @ b.float().mT


def exact_sums(a, b):
    """A·Bᵀ in fp32, in the order of instructions.h: sixteen numbers of k at a time."""
    a, b = a.float(), b.float()
    total = torch.zeros(len(a), a.shape[1], b.shape[1])
    for first in range(0, a.shape[2], _PART):
        part = torch.zeros_like(total)
        for k in range(first, min(first + _PART, a.shape[2])):
            part = part + a[:, :, k, None] * b[:, None, :, k]
        total = total + part
    return total


def fused(x, y, z):
    """x·y + z in fp32, rounded once. `y` may be a Python number, of which kernels know fp32."""
    y = torch.as_tensor(y, dtype=torch.float32)
    return (x.double() * y.double() + z.double()).float()


def completed(x):
    """A symmetric stack whose lower triangle is there."""
    return x.tril() + x.tril(-1).mT


def below(m):
    """Where the 64x64 boxes on and below the diagonal are."""
    box = torch.arange(m) // _BOX
    return box[:, None] >= box[None, :]


class Kernel:
    """Stands in for `ClusterLaunch`."""

    sums = staticmethod(quick_sums)

    def __init__(self, products, stacks, written=None, lands=0):
        self.products, self.stacks, self.lands = products, stacks, lands

    def __call__(self):
        assert not self.lands
        for product in self.products:
            self._write(product)

    def onto(self, landing):
        assert self.lands == landing.flag, "bound for another kind of step"
        *before, last = self.products
        for product in before:
            self._write(product)
        directions = fused(self._multiplied(last), last.alpha, torch.zeros(()))
        self._land(landing, directions.to(self.stacks[last.d].dtype).float())

    def scaled(self, alpha, beta, gamma):
        """What `symmetric_matmul` asks for."""
        (product,) = self.products
        c = None if product.c is None else self.stacks[product.c]
        total = self._total(self._multiplied(product), alpha, gamma, [] if c is None else [(beta, c)])
        self.stacks[product.d].copy_(completed(total.to(self.stacks[product.d].dtype)))

    def _multiplied(self, product):
        a, b = (
            completed(self.stacks[i]) if half else self.stacks[i]
            for i, half in zip(product.operands, (product.half_a, product.half_b), strict=True)
        )
        return self.sums(a, b if product.mirrored else b.mT)

    def _total(self, sums, alpha, gamma, added):
        eye = torch.eye(*sums.shape[1:]) * torch.tensor(gamma, dtype=torch.float32)
        total = fused(sums, alpha, eye)
        for factor, term in added:
            total = fused(term.float(), factor, total)
        return total

    def _write(self, product):
        sums, d = self._multiplied(product), self.stacks[product.d]
        if product.in_halves:
            scaled = torch.tensor(product.alpha) * sums
            high = scaled.to(d.dtype)
            rest = (torch.tensor(product.second.alpha) * (scaled - high.float())).to(d.dtype)
            self._put(product, {product.d: high, product.second.d: rest})
            return
        wanted = [(product.d, product.alpha, product.beta, product.delta, product.gamma)]
        wanted += [] if product.second is None else [tuple(product.second)]
        added = [self.stacks[i].clone() for i in product.added]
        totals = {
            number: self._total(sums, alpha, gamma, zip((beta, delta), added, strict=False)).to(d.dtype)
            for number, alpha, beta, delta, gamma in wanted
        }
        self._put(product, totals)

    def _put(self, product, results):
        for number, result in results.items():
            stack = self.stacks[number]
            whole = completed(result) if product.mirrored else result
            stack.copy_(torch.where(below(whole.shape[1]), whole, stack) if product.half_d else whole)

    def _land(self, landing, directions):
        if landing.proceed is not None and not landing.proceed:
            return
        for row, direction in zip(landing.table.entries.tolist(), directions, strict=True):
            at = {name: row[place] for name, place in _FIELDS.items()}
            if not at["grad"]:
                continue
            numbers = (ctypes.c_float * (at["rows"] * at["row stride"])).from_address(at["param"])
            param = torch.frombuffer(numbers, dtype=torch.float32)
            param = param.as_strided((at["rows"], at["cols"]), (at["row stride"], 1))
            direction = (direction.mT if at["turned"] else direction)[: at["rows"], : at["cols"]]
            scale = torch.tensor(at["scale"], dtype=torch.int32).view(torch.float32)
            rate, decay = landing.lr[0], landing.weight_decay
            kept = torch.ones(()) if decay is None else 1 - rate * decay[0]
            decayed = param * kept
            if landing.cautious:
                decayed = torch.where(direction * param > 0, decayed, param)
            param.copy_(decayed - direction * (rate * scale))


class Exact(Kernel):
    """The same, bit for bit; slow."""

    sums = staticmethod(exact_sums)
