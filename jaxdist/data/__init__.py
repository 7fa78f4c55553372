"""Sources to rows to global batches: the batch of a step depends on (data, seed, step) alone.

    config     what a user can ask                 tokenizer  text to tokens and back
    documents  files to documents                  corpus     tokenised shards on disk, cached
    encoding   documents to tokens                 chat       conversations, and what they teach
    packing    tokens to rows                      images     CIFAR-10
    custom     rows of the user's own              dataset    sources together, held-out split
    order      sample number to row                loader     rows to device batches
    __main__   `python -m jaxdist.data`

Nothing here knows a model; the only thing it asks of jax is to place arrays by a sharding.
"""

from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import Dataset, open_datasets
from jaxdist.data.loader import (
    Loader,
    check_same_everywhere,
    eval_batches,
    left_out_of,
    resume_sample,
)
from jaxdist.data.order import Order
from jaxdist.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "DataConfig",
    "Dataset",
    "Loader",
    "Order",
    "Tokenizer",
    "check_same_everywhere",
    "eval_batches",
    "left_out_of",
    "load_tokenizer",
    "open_datasets",
    "resume_sample",
]
