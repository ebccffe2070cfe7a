"""The configuration of a run: config files, overrides, optimizers as text."""

from train.config.optimizer import Optimizer as Optimizer
from train.config.run import Config as Config
from train.data.sources import Data as Data
from train.data.sources import Images as Images
