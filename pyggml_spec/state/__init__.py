"""What a sequence carries from round to round: KV cells, recurrent state with factor banks, captured features.

Tensors are shared by all sequences of an engine; which cells, slots and rows belong to whom is kept here, on the host.
"""
