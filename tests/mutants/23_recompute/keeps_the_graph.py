# expects: so its graph was kept from forward on
def checkpoint(function, *inputs):
    return function(*inputs)
