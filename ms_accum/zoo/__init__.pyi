from model_zoo import *
