"""Programs that train one model over a bucket. May import methods and what they import."""

from jaxcomp.islands.island import Island as Island
from jaxcomp.islands.island import Round as Round
from jaxcomp.islands.island import Seconds as Seconds
from jaxcomp.islands.island import Tokens as Tokens
from jaxcomp.islands.island import join as join
