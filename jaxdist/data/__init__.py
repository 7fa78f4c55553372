"""Turn sources into rows (`dataset`) and rows into global batches on the devices (`loader`)."""

from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import Dataset, TrainData, open_datasets
from jaxdist.data.loader import Loader, Position, eval_batches, resume_position
from jaxdist.data.order import Order
from jaxdist.data.tokenizer import load_tokenizer
