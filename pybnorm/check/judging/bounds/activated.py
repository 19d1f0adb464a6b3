r"""Bounds of calls with an activation, and with something added before it.

Forward
-------
An activation makes no error larger, and where the value before it is beyond a limit by more than its error the result
has none: with E the error of y before it is stored (`pybnorm.check.judging.bounds`) and a the activation,
E' = max(a(y + E) - a(y), a(y) - a(y - E)) + u \|a(y)\|, the last for a limit that is rounded to the compute type. With
a residual z, E is E + u_o (\|y\| + E) + t_o + 2u (\|y\| + \|z\|) first: y may be stored before z is added. Where
the result is blended it may be stored before as well: + u_o \|a(y)\|. Where it is not, and y +- E is beyond a limit,
the result is the limit as stored, within u_o/2 of it: the number beside it is wrong.

Backward
--------
With the gradient that the activation lets through in place of dy, everything is as without. Where forward's result is
given the mask is taken from it, and certain. Where it is made again from x, it is uncertain for those elements whose
value v is within e = E + u_o \|v\| + t_o of a limit, E of the loosest class. dy of such an element may be there or
not: with N = sum \|dy\| and M = sum \|dy x_hat\| over them, dbias may be off by N, dscale by M, and dx there by
\|scale\| r \|dy\|; N and M enter the bound of dx as errors of the sums do.

dz is dy where the mask is, else 0, to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from pybnorm import reference
from pybnorm.check.judging.bounds.classes import Tier, tiers
from pybnorm.check.judging.bounds.expected import Expected, Part, decided
from pybnorm.check.judging.bounds.formulas import forward_error
from pybnorm.check.language import activations
from pybnorm.check.language.data import round_to
from pybnorm.reference.namespaces import Array


class Activated(Expected):
    """The right outputs of a problem with an activation."""

    activated = True
    _uncertain: Array | None = None
    """dy of elements whose mask is uncertain, else 0; None where none is."""
    _at_limit: list[Array]
    """Of the block of y that is being made, by class: which elements are beyond a limit, whatever their error is."""

    def _finished(self, output: str, index: tuple[slice, ...], result: Array) -> tuple[Array, Callable[[Array], Array]]:
        if output != "y":
            return result, lambda error: error
        p, problem = self.precision, self.problem
        before, size = result, np.abs(result)
        if problem.residual:
            z = self.inputs.need("z")[index].astype(np.float64)
            before = result + z
        right = activations.activate(problem, before)
        self._at_limit = []
        low, high = activations.limits(problem)

        def finish(error: Array) -> Array:
            if problem.residual:
                error = error + p.u_out * (size + error) + p.tiny_out + 2 * p.u * (size + np.abs(z))
            above = activations.activate(problem, before + error)
            below = activations.activate(problem, before - error)
            self._at_limit.append((above == below) & ((right == low) | (right == high)))
            error = np.maximum(above - right, right - below) + p.u * np.abs(right)
            return error + p.u_out * np.abs(right) if (problem.alpha, problem.beta) != (1, 0) else error

        return right, finish

    def _whole(self, output: str) -> Array:
        if output == "dz":
            return self.inputs.need("dy").astype(np.float64)
        whole = super()._whole(output)
        if output == "y":
            everything = tuple(slice(0, n) for n in whole.shape)
            whole, _ = self._finished(output, everything, whole)
        return whole

    def _names(self) -> tuple[str, ...]:
        data, *parameters = super()._names()
        masked = self.problem.residual and data == "dx"
        return data, *(("dz",) if masked else ()), *parameters

    def _take_sums(self) -> None:
        """Take the sums of the gradient that passes; what else reads dy is given that too."""
        problem, inputs = self.problem, self.inputs
        dy = inputs.need("dy")
        passing, near = self._mask(inputs.y if problem.residual else None)
        masked = np.where(passing, dy, np.zeros((), dy.dtype))
        del passing
        if near is not None:
            self._uncertain = np.where(near, dy, np.zeros((), dy.dtype))
            del near

            def sums(dy: Array, x: Array, mean: Array, r: Array) -> Iterator[Array]:
                dy = np.abs(dy)
                yield dy
                yield dy * (np.abs(x - mean) * r)

            self._added = reference.reduce_blocks(
                sums, (self._uncertain, inputs.x), problem.mode, (self._mean, self._inverse)
            )
        self.inputs = dataclasses.replace(inputs, dy=masked)
        super()._take_sums()

    def _mask(self, result: Array | None) -> tuple[Array, Array | None]:
        """Say where the gradient passes, by forward's result if it is given, and where that is uncertain."""
        p, problem, inputs = self.precision, self.problem, self.inputs
        passing, near = (np.empty_like(inputs.x, dtype=bool) for _ in range(2))
        if result is not None:
            for block in reference.iterate_blocks([result], problem.mode):
                passing[block.index] = activations.passes(problem, block.arrays[0])
            return passing, None
        d = self.deviations(tiers(problem, "dx")[-1])
        errors = (np.broadcast_to(a, self._mean.shape) for a in (d.mean, d.inverse))
        parameters = (self._mean, self._inverse, inputs.scale, inputs.need("bias"), *errors)
        for block in reference.iterate_blocks([inputs.x], problem.mode, parameters):
            (x,), (mean, inverse, scale, bias, *own) = block.arrays, block.parameters
            value = (x - mean) * (scale * inverse) + bias
            error = forward_error(x, mean, inverse, scale, bias, own, p.u)
            error += p.u_out * (np.abs(value) + error) + p.tiny_out
            low, high = (np.abs(value - limit) > error for limit in activations.limits(problem))
            near[block.index] = ~(low & high)  # also where nothing is known
            passing[block.index] = activations.passes(problem, value)
        return passing, near if near.any() else None

    def sum_errors(self, tier: Tier) -> tuple[Array, Array]:
        """E of dscale and of dbias."""
        e_dscale, e_dbias = super().sum_errors(tier)
        if self._uncertain is None:
            return e_dscale, e_dbias
        d = self.deviations(tier)
        more = 1 + (tier.h + 4) * self.precision.u + d.inverse / self._inverse
        return e_dscale + self._added[1] * more, e_dbias + self._added[0] * more

    def _data_parts(self, output: str, got: Array | None, classes: tuple[Tier, ...]) -> Iterator[Part]:
        if output == "dz":
            for block, (_, right), values, _ in self._walk(output, got, ()):
                flushed = np.where(np.abs(right) < self.precision.tiny_out, np.abs(right), 0.0)
                yield Part(block.index, right, values, [(flushed, decided(flushed)) for _ in classes])
            return
        p, gain = self.precision, np.abs(self.wide("scale")) * self._inverse * abs(self.problem.alpha)
        plain = output == "y" and (self.problem.alpha, self.problem.beta) == (1, 0)
        for part in super()._data_parts(output, got, classes):
            if plain:  # a stored limit has a bound of its own where the result can be nothing else
                right = part.reference
                off = np.abs(round_to(right, self.problem.dtype).astype(np.float64) - right)
                # rounded to the compute type first, a limit may go to the other neighbour
                least = np.maximum((2 if p.u_out > p.u else 1) * off, 0.5 * p.u_out * np.abs(right)) + p.tiny_out
                made = zip(part.classes, self._at_limit, strict=True)
                yield dataclasses.replace(part, classes=[(np.where(at, least, b), u) for (b, u), at in made])
            elif output != "dx" or self._uncertain is None:
                yield part
            else:
                parameter = tuple(s if n != 1 else slice(0, 1) for s, n in zip(part.index, gain.shape, strict=True))
                masked = np.abs(self._uncertain[part.index].astype(np.float64))
                slack = masked * gain[parameter] * (1 + 8 * p.u_out)
                bounds = [(bound + slack, undecided) for bound, undecided in part.classes]
                yield dataclasses.replace(part, classes=bounds)
