"""Graph builders, one file per architecture, named as in GGUF. State is passed in; tensors keep llama.cpp's names."""
