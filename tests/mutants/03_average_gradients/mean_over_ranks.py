# expects: this is the mean over the
def average_gradients(parameters, tokens, group):
    for parameter in parameters:
        group.all_reduce(parameter.grad)
        parameter.grad /= group.size
