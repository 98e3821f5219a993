"""Decoding loops in torch, as plain as their papers' code: exact, DualCache, Sparse-dLLM, block-causal.

A cache is a list with a pair of tensors [b k s d] per layer. The first step of a block makes it again, later
ones change it in place, by slices; a block-causal model's grows by finished blocks. Attention is SDPA, with a
mask for such a model's prompt alone.
"""

import dataclasses
import functools
from typing import Any

import dllm_jax as dj
from bench.peer_torch.twin import Twin
from bench.shared.measure import Run

Cache = list[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Exact:
    """Recomputes the canvas in every step, and decodes the surest masks; our policy's settings hold here."""

    twin: Twin
    policy: dj.policies.Policy

    def generate(self, tokens: Any, run: Run) -> Any:
        """Decodes the response of `tokens` [b l] in place, block by block, by LLaDA's transfer schedule."""
        steps = run.steps * run.block // run.length
        for start in range(run.prompt, run.prompt + run.length, run.block):
            block, cache = slice(start, start + run.block), []
            for step in range(steps):
                logits = self.twin.logits(self.hidden(tokens, block, step, cache))
                count = run.block // steps + (step < run.block % steps)
                self._decode(tokens[:, block], logits, count)
        return tokens

    def hidden(self, tokens: Any, block: slice, step: int, cache: Cache) -> Any:
        """Hidden states [b c m] that predict the block of the canvas [b l] in its `step`-th step."""
        return self.twin.full(tokens)[:, self._predictors(block)]

    def _predictors(self, block: slice) -> slice:
        """The positions whose output predicts the block: those to the left where the head is shifted."""
        shift = int(self.twin.spec.shifted)
        return slice(block.start - shift, block.stop - shift)

    def _decode(self, tokens: Any, logits: Any, count: int) -> None:
        """Writes the most likely tokens of the `count` surest masks; tokens [b c] are changed in place."""
        confidence, token = self._candidates(tokens, logits)
        surest = confidence.topk(count, dim=-1).indices
        tokens.scatter_(1, surest, token.gather(1, surest))

    def _candidates(self, tokens: Any, logits: Any) -> tuple[Any, Any]:
        """Each position's most likely token [b c] and its probability, -1 where nothing is masked.

        [MASK] is never decoded, though its probability counts, as in our samplers.
        """
        torch, mask_id = self.twin.torch, self.twin.spec.mask_id
        probability = torch.softmax(logits, dim=-1)
        probability[..., mask_id] = 0
        confidence, token = probability.max(dim=-1)
        return torch.where(tokens == mask_id, confidence, -1.0), token


@dataclasses.dataclass(frozen=True)
class DualCache(Exact):
    """Keeps K/V of the first step of a block; later steps replace the block's slice of them (Fast-dLLM)."""

    def hidden(self, tokens: Any, block: slice, step: int, cache: Cache) -> Any:
        """A full step fills the cache; later ones feed the block, which attends to all of the canvas."""
        computed = self._predictors(block)
        if step > 0:
            return self._replacing(tokens[:, computed], computed.start, computed, cache)

        def filling(_: int, q: Any, k: Any, v: Any) -> Any:
            cache.append((k, v))
            return self.twin.attention(q, k, v)

        return self.twin.hidden(tokens, 0, filling)[:, computed]

    def _replacing(self, tokens: Any, first: int, slots: slice, cache: Cache) -> Any:
        """Hidden states of tokens [b q] from the canvas position `first` on; their K/V go to the slots."""

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            keys, values = cache[layer]
            keys[:, :, slots], values[:, :, slots] = k, v
            return self.twin.attention(q, keys, values)

        return self.twin.hidden(tokens, first, attend)


@dataclasses.dataclass(frozen=True)
class SparseDLLM(DualCache):
    """Keeps the pairs outside of the block that its mean query scores best, and the block's own at the end.

    The first 1 + delay steps of a block are full; the last of them scores and keeps, in every layer.
    """

    policy: dj.policies.SparseDLLM

    def hidden(self, tokens: Any, block: slice, step: int, cache: Cache) -> Any:
        """Full steps, of which the last fills the cache; later ones feed the block."""
        computed, width = self._predictors(block), block.stop - block.start
        if step > self.policy.delay:
            return self._replacing(tokens[:, computed], computed.start, slice(-width, None), cache)

        def filling(_: int, q: Any, k: Any, v: Any) -> Any:
            if step == self.policy.delay:
                cache.append(self._kept(q, k, v, block))
            return self.twin.attention(q, k, v)

        return self.twin.hidden(tokens, 0, filling)[:, computed]

    def _kept(self, q: Any, k: Any, v: Any, block: slice) -> tuple[Any, Any]:
        """The pairs of one layer that the block will attend to, after them its own (Algorithm 1)."""
        torch, policy, computed = self.twin.torch, self.policy, self._predictors(block)
        canvas = torch.arange(k.shape[2], device=k.device)
        outside = torch.cat((canvas[: computed.start], canvas[block.stop :]))

        # Importance: the product with the mean query, mean over heads, then the maximum over neighbors.
        mean = q[:, :, block].mean(dim=2, keepdim=True)
        keys = k[:, :, outside].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        score = (mean @ keys.transpose(2, 3)).squeeze(2).mean(dim=1)
        window = policy.kernel
        pooled = torch.nn.functional.max_pool1d(score, window, stride=1, padding=window // 2)

        # Pooling makes equal scores, whose order `topk` leaves open: a stable sort takes the leftmost.
        order = pooled.sort(dim=-1, descending=True, stable=True).indices
        chosen = outside[order[:, : int(len(outside) * policy.keep)]]

        # With a shifted head the block's last position is not computed again: its pair is always kept.
        last = canvas[computed.stop : block.stop].expand(len(chosen), -1)
        stored = torch.cat((chosen, last, canvas[computed].expand(len(chosen), -1)), dim=1)
        gather = lambda x: torch.take_along_dim(x, stored[:, None, :, None], dim=2)
        return gather(k), gather(v)


@dataclasses.dataclass(frozen=True)
class BlockCausal(Exact):
    """SDAR's loop: a step computes its block alone, with stored K/V of earlier ones, which are final.

    A finished block takes one more forward, which stores its K/V, the last block too. The vocabulary head is
    applied in denoising steps only. With a shifted head (Fast-dLLM v2) what stores a block also predicts the
    next one's first token. LLaDA2's loop stores nothing: a step computes all that came before, too; `stores`
    has it store blocks all the same.
    """

    stores: bool = False

    def generate(self, tokens: Any, run: Run) -> Any:
        """Decodes `tokens` [b l], whole blocks at least, in place by the run's `Dynamic` sampler."""
        steps, cache, last = run.steps * run.block // run.length, [], tokens
        assert isinstance(run.sampler, dj.samplers.Dynamic)
        stores, threshold = self.stores or self.twin.spec.family != "llada2-moe", float(run.sampler.threshold)
        if (whole := run.prompt // run.block * run.block) and stores:
            last = self._beginning(tokens[:, :whole], run.block, cache)
        for start in range(whole, run.prompt + run.length, run.block):
            block, every = tokens[:, start : start + run.block], tokens[:, : start + run.block]
            if self.twin.spec.shifted and start >= run.prompt:
                self._decode(block[:, :1], self.twin.logits(last[:, -1:]), 1)
            for step in range(steps):
                if not (block == self.twin.spec.mask_id).any():
                    break
                if stores:
                    hidden = self._hidden(block, start, list(cache))
                else:
                    hidden = self._beginning(every, run.block, [])[:, -run.block :]
                if self.twin.spec.shifted:  # the first row's own output is never used
                    hidden = self.twin.torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)
                count = run.block // steps + (step < run.block % steps)
                self._decode_sure(block, self.twin.logits(hidden), count, threshold)
            last = self._hidden(block, start, cache) if stores else last
        return tokens

    def _hidden(self, tokens: Any, first: int, cache: Cache, mask: Any = None) -> Any:
        """Hidden states of tokens [b q] from a canvas position on; their K/V are added to the cache."""

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            if first:
                k, v = (self.twin.torch.cat(pair, dim=2) for pair in zip(cache[layer], (k, v), strict=True))
            cache[layer : layer + 1] = [(k, v)]
            return self.twin.attention(q, k, v, mask)

        return self.twin.hidden(tokens, first, attend)

    def _beginning(self, tokens: Any, size: int, cache: Cache) -> Any:
        """Hidden states of whole blocks, each of which attends to its own positions and earlier blocks."""
        block = self.twin.torch.arange(tokens.shape[1], device=tokens.device) // size
        return self._hidden(tokens, 0, cache, block[:, None] >= block)

    def _decode_sure(self, tokens: Any, logits: Any, count: int, threshold: float) -> None:
        """Writes the masks above the threshold if these are at least `count`, else that many surest ones."""
        torch, masked = self.twin.torch, tokens == self.twin.spec.mask_id
        confidence, token = self._candidates(tokens, logits)
        best = torch.zeros_like(masked).scatter(1, confidence.topk(count, dim=-1).indices, value=True)
        sure = confidence > threshold
        chosen = torch.where(sure.sum(dim=1, keepdim=True) >= count, sure, best) & masked
        tokens.copy_(torch.where(chosen, token, tokens))


PEERS: dict[type[dj.policies.Policy], type[Exact]] = {
    dj.policies.Policy: Exact,
    dj.policies.DualCache: DualCache,
    dj.policies.SparseDLLM: SparseDLLM,
}


def peer(twin: Twin, policy: dj.policies.Policy, stores: bool = False) -> Exact:
    """The torch decoder that does what the policy does; `stores` is `BlockCausal`'s.

    Raises:
      ValueError: a policy without a peer, or settings of it that the torch decoder does not know.
    """
    if isinstance(policy, dj.policies.SparseDLLM) and policy.side != "both":
        raise ValueError(f"{policy!r}: side={policy.side!r} must be 'both' beside torch")
    of_blocks = functools.partial(BlockCausal, stores=stores)
    peers = {dj.policies.Policy: of_blocks} if twin.spec.block_size else PEERS
    if type(policy) not in peers:
        names = ", ".join(kind.__name__ for kind in peers)
        raise ValueError(f"{policy!r} has no peer in torch: {names} of this model have; see bench.generate")
    return peers[type(policy)](twin, policy)
