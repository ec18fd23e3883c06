"""Decoding: rounds, sessions, sampling, stops and statistics, and the engine that joins them with models and state."""
