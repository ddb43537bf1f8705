"""Sampling, with a key-value cache kept out of the training forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.documents import Attend
from model.gpt import GPT, causal_attention


def generate(
    model: GPT,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_token: int | None = None,
) -> Tensor:
    """Continue each row of tokens [batch, time] by up to max_new_tokens: [batch, time + new].

    The model sees at most max_sequence_length tokens. When that window is full, generation goes on
    from its later half, so that a window is read again only once per half of its length. All of it
    is one document, whatever the model's separator.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among this many likeliest tokens only.
        seed: equal seeds give equal tokens; the global random state is neither used nor changed.
        stop_token: a row that produced it repeats it; generation ends once every row did.
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be [batch, time] with time > 0, not {list(tokens.shape)}")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must not be negative")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            generator = torch.Generator(tokens.device).manual_seed(seed)
            window = Window(model)
            stopped = torch.zeros_like(tokens[:, :1], dtype=torch.bool)
            for _ in range(max_new_tokens):
                logits = window.next_logits(tokens)
                chosen = sample(logits, temperature, top_k, generator)
                if stop_token is not None:
                    chosen = chosen.masked_fill(stopped, stop_token)
                    stopped |= chosen == stop_token
                tokens = torch.cat((tokens, chosen), dim=1)
                if stop_token is not None and stopped.all():
                    break
        return tokens.clone()  # an ordinary tensor: autograd refuses those of inference mode
    finally:
        model.train(was_training)


class Window:
    """The tokens that the model remembers: keys and values of each block, and how many."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.length = 0
        self.caches: list[Attend] = []

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after tokens [batch, time], of which only the last is new."""
        longest = self.model.config.max_sequence_length
        if 0 < self.length < longest:
            unread = tokens[:, -1:]
        else:
            unread = tokens[:, -(longest if self.length == 0 else max(1, longest // 2)) :]
            self.length = 0
            self.caches = [cached_attention() for _ in self.model.blocks]
        end = self.length + unread.shape[1]
        x, rotary = self.model.embed(unread, torch.arange(self.length, end, device=tokens.device))
        self.length = end
        for block, attend in zip(self.model.blocks, self.caches, strict=True):
            x = block(x, rotary, attend)
        logits = self.model.head(self.model.final_norm(x[:, -1:]))[:, 0]
        return logits[:, : self.model.config.vocabulary_size].float()


def cached_attention() -> Attend:
    """Attention to all keys and values seen so far: first a whole prompt, then token by token."""
    past: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if not past:
            past.extend((k, v))
            return causal_attention(q, k, v, dropout)
        grouped = k.shape[1] != q.shape[1]
        past[:] = k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        # One query, the latest: it sees every key, so there is nothing to mask.
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    return attend


def sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    """One token id [batch, 1] for each row of logits [batch, vocabulary]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)
