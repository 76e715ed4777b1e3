"""Fill forward passes by tokens: rows of uneven length are spread over ranks and passes and laid out without padding.

`balance` plans which rank forwards which rows together, `layout` and `batch` turn them into tensors, `forward` scores
them through `attention` and `linear_attention`, and `packer` makes of it the passes of each optimizer step and rank.

Letters of shapes, one for one axis, here and in `grpo.loss`:

    B  rows                         C  trained tokens of a row (padded)      T  tokens of a row
    W  ranks (world size)           M  micro-batches of a rank               U  prefix clusters
    L  tokens of a flat layout      E  its segments (edges of the tree)      S  its scored tokens
    H  heads                        Q  heads of queries and keys, if fewer   D  channels of a convolution
    K  size of a query or key head  V  size of a value head                  X  tokens that it reaches back
"""
