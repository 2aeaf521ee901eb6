"""Text generation: prompts read in segments, tokens sampled one by one, prompt states saved and forked."""
