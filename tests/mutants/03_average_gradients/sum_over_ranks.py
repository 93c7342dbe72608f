# expects: not weighted by tokens and not divided
def average_gradients(parameters, tokens, group):
    for parameter in parameters:
        group.all_reduce(parameter.grad)
