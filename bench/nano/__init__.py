"""A miniature GLM-5.3-Flash, trained in this repository: corpus, training, evaluation, quantising.

It exists because random weights hide quality bugs: with a trained model, perplexity, KL after
quantising, acceptance of drafts and garbled output are real figures. The modules are tools run by
hand (`python -m nano.corpus`, `nano.train`, ...) with `bench` and `overlay` on the import path;
nothing in the serving process imports them.
"""
