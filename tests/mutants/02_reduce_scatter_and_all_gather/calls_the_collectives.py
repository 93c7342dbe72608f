# expects: build it from send and recv alone
def reduce_scatter(buffer, group):
    return group.reduce_scatter(buffer)


def all_gather(piece, group):
    return group.all_gather(piece)
