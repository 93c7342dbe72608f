# expects: this is the old piece of the same number
def load_piece(read, saved, dim, blocks, group):
    return read(group.rank % saved)
