"""From logits to tokens, logprobs and scores."""
