"""The directory on the PYTHONPATH of vLLM servers; it holds what runs inside them."""
