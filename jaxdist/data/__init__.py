"""Sources to rows to global batches: the batch of a step depends on (data, seed, step) alone.

    config     what a user can ask                 tokenizer  text to tokens and back
    documents  files to documents                  corpus     tokenised shards on disk, cached
    encoding   documents to tokens                 chat       conversations, and what they teach
    packing    tokens to rows                      images     CIFAR-10
    custom     rows of the user's own, by number   stream     rows of the user's own, in sequence
    dataset    sources together, held-out split    order      sample number to row
    batches    batch number to rows, for grain     prefetch   grain's thread and worker processes
    loader     batches on devices, and resuming    __main__   `python -m jaxdist.data`

Nothing here knows a model; the only thing it asks of jax is to place arrays by a sharding.
"""

from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import Dataset, TrainData, open_datasets
from jaxdist.data.loader import (
    Loader,
    Position,
    check_same_everywhere,
    eval_batches,
    resume_position,
)
from jaxdist.data.order import Order
from jaxdist.data.tokenizer import Tokenizer, load_tokenizer
