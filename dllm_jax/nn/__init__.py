"""The network: a decoder as pure functions, a layer opened at its seams; knows nothing of decoding."""
