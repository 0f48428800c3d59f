"""Tiling (exact up to the order of summation): tensors that never exist whole.

- `head`: a language-model head and its cross-entropy, a few rows of logits at a time (`lazy`, `recipe`, `loss`);
- `attention`: attention of models that materialise their scores, fused or a few queries at a time (`scores`);
- `mlp`: a position-wise MLP, a stretch of the sequence at a time;
- `find`: which modules of a model are which, from a recorded forward.

Bounds, against the plain model: in fp32 gradients within a relative 1e-5 and the loss within 1e-6.
"""

from memscale.techniques.tiling.attention import attach_attention as attach_attention
from memscale.techniques.tiling.common import TilingError as TilingError
from memscale.techniques.tiling.find import Found as Found
from memscale.techniques.tiling.find import Recording as Recording
from memscale.techniques.tiling.find import find_attentions as find_attentions
from memscale.techniques.tiling.find import find_head as find_head
from memscale.techniques.tiling.find import find_mlps as find_mlps
from memscale.techniques.tiling.find import record as record
from memscale.techniques.tiling.head import attach_head as attach_head
from memscale.techniques.tiling.head.lazy import LazyLogits as LazyLogits
from memscale.techniques.tiling.head.recipe import StaleLogitsError as StaleLogitsError
from memscale.techniques.tiling.mlp import attach_mlp as attach_mlp
