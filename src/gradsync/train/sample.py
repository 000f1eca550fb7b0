"""Text from a model: a prompt's tokens in, decoded pieces out, as they come."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gradsync.data.tokenizer import Tokenizer
from gradsync.model.sampling import Sampled, stream


@dataclass(frozen=True)
class SampleOptions:
    """How text is drawn; the same options give the same text."""

    num_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0


def stream_text(
    model: Sampled, tokenizer: Tokenizer, prompt: str, options: SampleOptions, device: torch.device
) -> Iterator[str]:
    """Yield the text that follows a prompt, piece by piece; it ends where the model ends the text.

    The model is put back into the mode it was in, and no random state but an own one is used, so
    that a sample in the middle of a training run changes nothing.
    """
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.end_of_text]
    generator = torch.Generator(device).manual_seed(options.seed)
    tokens = stream(
        model,
        torch.tensor([ids], device=device),
        options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        generator=generator,
        stop_token=tokenizer.end_of_text,
    )
    decoder = tokenizer.stream_decoder()
    for token in tokens:
        if int(token) == tokenizer.end_of_text:
            break
        if piece := decoder.feed(int(token)):
            yield piece
    if rest := decoder.finish():
        yield rest
