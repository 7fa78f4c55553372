"""Sources to rows to global batches: the batch of a step depends on (data, seed, step) alone.

    config     what a user can ask                 tokenizer  text to tokens and back
    documents  files to documents                  corpus     tokenised shards on disk, cached
    encoding   documents to tokens                 chat       conversations, and what they teach
    packing    tokens to rows                      images     CIFAR-10
    custom     rows of the user's own, by number   stream     rows of the user's own, in sequence
    dataset    sources together, held-out split    order      sample number to row
    batches    batch number to rows, for grain     prefetch   grain's thread and worker processes
    loader     batches on devices, and resuming    ledger     hash chain of the sample ids
    __main__   `python -m jaxdist.data`            template_sandbox   chat templates, with limits

Nothing here knows a model. Of jax it takes the processes and the placing of arrays by a sharding,
of the core the order of positions that the context axis asks for.
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
