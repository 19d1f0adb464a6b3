/* Made by `python -m benchmarks.rules write` from times in
 * docs/results/h200-sweep.txt: NVIDIA H200, cuDNN 9.19.0, 2026-11-23,
 * docs/results/h100-sweep.txt: NVIDIA H100 80GB HBM3, cuDNN 9.19.0, 2026-11-25. */
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .fast = 1, .channels = {0, 768}, .values = {0, 24},
     .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 7 of 7 shapes of the sweep; but sums in fixed "
            "point: the absolute error of a gradient is about 2e-6 for 800000 values, and values below 1e-5 or "
            "above 1e10 lose their digits"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .fast = 1, .channels = {768, 0}, .values = {0, 12288},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 52 of 57 shapes of the sweep, in the median 1.2 "
            "times as fast as spatial; but over channels-first memory it is persistent"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .fast = 1, .images = {0, 384}, .values = {12288, 0},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 107 of 116 shapes of the sweep, in the median 1.4 "
            "times as fast as spatial; but over channels-first memory it is persistent"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .fast = 1, .images = {384, 0}, .values = {12288, 0},
     .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 18 of 19 shapes of the sweep, in the median 1.3 "
            "times as fast as spatial; but sums in fixed point: the absolute error of a gradient is about 2e-6 "
            "for 800000 values, and values below 1e-5 or above 1e10 lose their digits"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .fast = 1, .values = {4096, 12288}, .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 39 of 40 shapes of the sweep; but sums in fixed "
            "point: the absolute error of a gradient is about 2e-6 for 800000 values, and values below 1e-5 or "
            "above 1e10 lose their digits"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .fast = 1, .values = {12288, 3145728}, .lines = {0, 65536},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 73 of 86 shapes of the sweep, in the median 2.6 "
            "times as fast as spatial; but over channels-first memory it is persistent"},
    {PBN_OP_BACKWARD, HALVES, FIRST, .saved = 1, .fast = 1, .values = {12288, 3145728}, .lines = {65536, 0},
     .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 22 of 24 shapes of the sweep, in the median 1.3 "
            "times as fast as spatial; but sums in fixed point: the absolute error of a gradient is about 2e-6 "
            "for 800000 values, and values below 1e-5 or above 1e10 lose their digits"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .fast = 1, .values = {3145728, 0}, .algorithm = "rows:1",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 11 shapes of the sweep, in the median 7.6 "
            "times as fast as spatial; but less exact than columns where a channel begins with a value far from "
            "its others"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .fast = 1, .size = {65536, 0}, .algorithm = "rows",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep, in the median 15 times "
            "as fast as spatial; but less exact than columns where a channel begins with a value far from its "
            "others"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, FIRST, .channels = {192, 0}, .size = {2, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 33 of 34 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {0, 384}, .values = {0, 24576},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 159 of 161 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, FIRST, .channels = {0, 17}, .values = {24576, 98304}, .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep, in the median 2 times "
            "as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, FIRST, .channels = {17, 384}, .values = {24576, 98304}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 5 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES, FIRST, .channels = {0, 384}, .values = {24576, 98304}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep, in the median 4.2 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {384, 0}, .values = {0, 98304}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 32 of 36 shapes of the sweep, in the median 2.1 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .images = {0, 12}, .channels = {0, 65}, .values = {98304, 0},
     .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 8 of 9 shapes of the sweep, in the median 1.9 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .images = {0, 12}, .channels = {65, 0}, .values = {98304, 0},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .images = {12, 256}, .channels = {0, 128}, .values = {98304, 0},
     .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 14 of 16 shapes of the sweep, in the median 4.7 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .images = {12, 256}, .channels = {128, 0}, .values = {98304, 0},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, FIRST, .images = {256, 0}, .values = {98304, 0}, .lines = {0, 49152},
     .algorithm = "columns:1",
     .why = "of all ways the fastest, or within 3 % of it, on 4 of 4 shapes of the sweep, in the median 2 times "
            "as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, FIRST, .images = {256, 0}, .values = {98304, 0}, .lines = {49152, 0},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 5 of 6 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES, FIRST, .images = {256, 0}, .values = {98304, 0}, .algorithm = "columns:1",
     .why = "of all ways the fastest, or within 3 % of it, on 20 of 20 shapes of the sweep, in the median 2.2 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 43 of 93 shapes of the sweep"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .lines = {0, 16384}, .kilobytes = {0, 5}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 12 shapes of the sweep"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .values = {0, 49152}, .lines = {0, 16384},
     .kilobytes = {5, 32768}, .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 31 of 33 shapes of the sweep, in the median 2.1 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .size = {0, 32768}, .values = {49152, 0}, .lines = {0, 16384},
     .kilobytes = {5, 32768}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 24 of 25 shapes of the sweep"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .size = {32768, 0}, .values = {49152, 0}, .lines = {0, 16384},
     .kilobytes = {5, 32768}, .algorithm = "rows",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep, in the median 1.4 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .images = {0, 48}, .values = {0, 524288}, .lines = {0, 16384},
     .kilobytes = {32768, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 7 shapes of the sweep"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .images = {0, 48}, .values = {524288, 0}, .lines = {0, 16384},
     .kilobytes = {32768, 0}, .algorithm = "rows:1",
     .why = "of all ways the fastest, or within 3 % of it, on 11 of 13 shapes of the sweep, in the median 1.3 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .images = {48, 0}, .lines = {0, 16384}, .kilobytes = {32768, 0},
     .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 7 of 10 shapes of the sweep, in the median 1.4 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .lines = {16384, 0}, .kilobytes = {0, 98304},
     .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 27 of 29 shapes of the sweep, in the median 2.3 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .lines = {16384, 0}, .kilobytes = {98304, 0},
     .algorithm = "columns:1",
     .why = "of all ways the fastest, or within 3 % of it, on 33 of 34 shapes of the sweep, in the median 1.7 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 71 of 77 shapes of the sweep, in the median 3.5 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {0, 384}, .values = {0, 12288},
     .kilobytes = {0, 129}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 87 of 87 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {0, 384}, .values = {0, 12288},
     .kilobytes = {129, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 2 shapes of the sweep, in the median 1.4 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {0, 24}, .values = {12288, 49152},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 3 shapes of the sweep, in the median 2.4 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {0, 24}, .values = {49152, 65536},
     .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 4 shapes of the sweep, in the median 1.9 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {24, 384}, .values = {12288, 65536},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 22 of 24 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {384, 0}, .values = {0, 65536},
     .lines = {0, 3072}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 10 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {384, 0}, .values = {0, 65536},
     .lines = {3072, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 29 of 34 shapes of the sweep, in the median 2.2 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {0, 12}, .channels = {0, 65}, .values = {65536, 0},
     .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 10 shapes of the sweep, in the median 2.4 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {0, 12}, .channels = {65, 0}, .values = {65536, 0},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {12, 0}, .channels = {0, 257}, .values = {65536, 0},
     .lines = {0, 16384}, .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 26 of 26 shapes of the sweep, in the median 5.5 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {12, 0}, .channels = {0, 257}, .values = {65536, 0},
     .lines = {16384, 0}, .algorithm = "columns:1",
     .why = "of all ways the fastest, or within 3 % of it, on 18 of 18 shapes of the sweep, in the median 1.9 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {12, 0}, .channels = {257, 0}, .values = {65536, 0},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 8 of 9 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 40 of 91 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .values = {0, 49152}, .lines = {0, 49152},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 38 of 38 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .values = {0, 49152}, .lines = {49152, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 10 of 10 shapes of the sweep, in the median 1.7 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .images = {0, 12}, .values = {49152, 0},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 4 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .images = {12, 0}, .values = {49152, 0},
     .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 16 of 18 shapes of the sweep, in the median 3.6 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .fast = 1, .kilobytes = {0, 24}, .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 15 of 20 shapes of the sweep; but sums in fixed "
            "point: the absolute error of a gradient is about 2e-6 for 800000 values, and values below 1e-5 or "
            "above 1e10 lose their digits"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .fast = 1, .images = {8, 0}, .channels = {0, 4},
     .kilobytes = {24, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 6 shapes of the sweep; but its error grows "
            "with mean / deviation: 4e-4 of y at 1e4"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .fast = 1, .channels = {4, 48}, .size = {0, 192},
     .kilobytes = {24, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 18 of 19 shapes of the sweep; but its error grows "
            "with mean / deviation: 4e-4 of y at 1e4"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .fast = 1, .images = {16, 0}, .channels = {4, 8},
     .size = {192, 0}, .kilobytes = {24, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep; but its error grows "
            "with mean / deviation: 4e-4 of y at 1e4"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .values = {0, 1024}, .kilobytes = {0, 24}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 18 of 18 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .values = {1024, 0}, .kilobytes = {0, 24}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 2 shapes of the sweep, in the median 1.2 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .channels = {0, 16}, .kilobytes = {24, 1025},
     .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 18 shapes of the sweep, in the median 4.1 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .channels = {16, 0}, .kilobytes = {24, 48}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 4 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .channels = {16, 0}, .kilobytes = {48, 1025}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 42 of 49 shapes of the sweep, in the median 2.2 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .lines = {0, 16384}, .kilobytes = {1025, 4096},
     .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 11 of 21 shapes of the sweep, in the median 11 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .channels = {0, 16}, .lines = {0, 16384}, .kilobytes = {4096, 0},
     .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 12 of 13 shapes of the sweep, in the median 93 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .channels = {16, 256}, .lines = {0, 16384}, .kilobytes = {4096, 0},
     .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 18 of 26 shapes of the sweep, in the median 58 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .channels = {256, 0}, .lines = {0, 16384}, .kilobytes = {4096, 0},
     .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 5 of 11 shapes of the sweep, in the median 24 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, .row_bytes = 4, .channels = {0, 257}, .lines = {16384, 0},
     .kilobytes = {1025, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 10 of 10 shapes of the sweep, in the median 29 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, .row_bytes = 4, .channels = {257, 0}, .lines = {16384, 0},
     .kilobytes = {1025, 0}, .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 12 shapes of the sweep, in the median 19 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, .row_bytes = 4, .lines = {16384, 0}, .kilobytes = {1025, 0},
     .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 21 of 26 shapes of the sweep, in the median 73 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .lines = {16384, 0}, .kilobytes = {1025, 0},
     .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 11 shapes of the sweep, in the median 34 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 137 of 274 shapes of the sweep, in the median 12 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 75 of 185 shapes of the sweep, in the median 25 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {0, 192}, .kilobytes = {0, 49152},
     .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 141 of 147 shapes of the sweep, in the median 1.4 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {192, 0}, .kilobytes = {0, 16384},
     .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 40 of 47 shapes of the sweep, in the median 2.1 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {192, 0}, .kilobytes = {16384, 49152},
     .algorithm = "pointwise:1",
     .why = "of all ways the fastest, or within 3 % of it, on 10 of 12 shapes of the sweep, in the median 2.3 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {0, 64}, .kilobytes = {49152, 0},
     .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 8 of 8 shapes of the sweep, in the median 1.2 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {64, 65}, .kilobytes = {49152, 0},
     .algorithm = "pointwise:2",
     .why = "of all ways the fastest, or within 3 % of it, on 12 of 14 shapes of the sweep, in the median 2.3 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channel_bytes = 4, .channels = {65, 0}, .kilobytes = {49152, 0},
     .algorithm = "pointwise:1",
     .why = "of all ways the fastest, or within 3 % of it, on 40 of 44 shapes of the sweep, in the median 1.7 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {65, 0}, .kilobytes = {49152, 0},
     .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep, in the median 2.7 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 200 of 273 shapes of the sweep, in the median 1.5 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {0, 128}, .values = {0, 512},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 18 of 18 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channel_bytes = 16, .channels = {0, 128}, .size = {0, 24576},
     .values = {512, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 43 of 76 shapes of the sweep, in the median 25 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channel_bytes = 16, .channels = {0, 128}, .size = {24576, 0},
     .values = {512, 0}, .kilobytes = {0, 65536}, .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 10 shapes of the sweep, in the median 77 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channel_bytes = 16, .channels = {0, 128}, .size = {24576, 0},
     .values = {512, 0}, .kilobytes = {65536, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 9 shapes of the sweep, in the median 58 times "
            "as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {0, 8}, .values = {512, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 20 of 20 shapes of the sweep, in the median 33 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {8, 128}, .values = {512, 0},
     .algorithm = "graph:1",
     .why = "between the shapes of the sweep the fastest by its expected time"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {128, 0}, .kilobytes = {0, 32},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {128, 0}, .kilobytes = {32, 2048},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 23 of 25 shapes of the sweep, in the median 4.1 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {128, 0}, .kilobytes = {2048, 8192},
     .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 5 of 14 shapes of the sweep, in the median 20 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {128, 384}, .kilobytes = {8192, 0},
     .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 12 of 15 shapes of the sweep, in the median 48 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {384, 0}, .kilobytes = {8192, 0},
     .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 26 of 35 shapes of the sweep, in the median 36 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 164 of 273 shapes of the sweep, in the median 17 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .kilobytes = {0, 32}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 4 of 6 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .size = {0, 1025}, .kilobytes = {32, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 18 of 23 shapes of the sweep, in the median 6.4 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .size = {1025, 0}, .kilobytes = {32, 0},
     .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 12 shapes of the sweep, in the median 30 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 30 of 44 shapes of the sweep, in the median 8.9 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 15 of 32 shapes of the sweep, in the median 8.8 "
            "times as fast as spatial"},
