from norms import *
from norms import random_problem as random_norm_problem
