"""Turn sources into rows and rows into global batches, which depend on (data, seed, step) only.

    config     settings                            tokenizer  text to tokens and back
    documents  files to documents                  corpus     tokenized shards on disk, cached
    encoding   documents to tokens                 chat       conversations to tokens and weights
    packing    tokens to rows                      images     CIFAR-10
    custom     rows of a user's function           stream     a user's stream of rows
    dataset    all sources, held-out split         order      sample number to row
    batches    batch number to rows, prefetching   loader     batches on devices, and resuming
    ledger     hash chain of the sample ids
    __main__   `python -m jaxdist.data`            template_sandbox   chat templates, with limits

Nothing here depends on a model.
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
