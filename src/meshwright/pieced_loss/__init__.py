"""The loss without logits: a model's output layer and its cross entropy, computed in pieces of rows.

`head.py` makes the output layer return `Logits`: a tensor with a shape and no memory. Functions that keep its rows
apart are recorded (`recorded.py`); cross entropy (`losses.py`) then runs piece by piece (`rows.py`); any other function
gets the real logits. Backward carries gradients of the layer's operands in place of the logits' gradient
(`gradient.py`).
"""
