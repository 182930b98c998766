"""BibTeX entries of the papers that several rules come from."""

THESIS = """\
@mastersthesis{hermans2017,
  author = {Hermans, Joeri},
  title  = {On Scalable Deep Learning and Parallelizing Gradient Descent},
  school = {Maastricht University},
  year   = {2017},
}"""

DANA = """\
@article{hakimi2019,
  author  = {Hakimi, Ido and Barkai, Saar and Gabel, Moshe and Schuster, Assaf},
  title   = {Taming Momentum in a Distributed Asynchronous Environment},
  journal = {arXiv preprint arXiv:1907.11612},
  year    = {2019},
}"""

ORMO = """\
@inproceedings{shi2024,
  author    = {Shi, Chang-Wei and Yang, Yi-Rui and Li, Wu-Jun},
  title     = {Ordered Momentum for Asynchronous {SGD}},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}"""

DELAY_COMPENSATION = """\
@inproceedings{zheng2017,
  author    = {Zheng, Shuxin and Meng, Qi and Wang, Taifeng and Chen, Wei and others},
  title     = {Asynchronous Stochastic Gradient Descent with Delay Compensation},
  booktitle = {International Conference on Machine Learning},
  year      = {2017},
}"""
