/* Made by `python -m benchmarks.rules write` from docs/results/h200-sweep.txt, which has the times:
 * NVIDIA H200, cuDNN 9.19.0, 2026-11-23. */
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .fast = 1, .values = {6144, 0}, .kilobytes = {129, 0},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 63 of 69 shapes of the sweep, in the median 1.2 "
            "times as fast as spatial; but over channels-first memory it is persistent"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .fast = 1, .size = {1024, 0}, .values = {0, 6144},
     .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 8 of 8 shapes of the sweep; but sums in fixed "
            "point: the absolute error of a gradient is about 2e-6 for 800000 values, and values below 1e-5 or "
            "above 1e10 lose their digits"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .fast = 1, .channels = {0, 1536}, .values = {6144, 786432},
     .lines = {0, 65536}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 37 of 42 shapes of the sweep; but over "
            "channels-first memory it is persistent"},
    {PBN_OP_BACKWARD, HALVES, FIRST, .saved = 1, .fast = 1, .channels = {0, 1536}, .values = {6144, 786432},
     .lines = {65536, 0}, .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 6 shapes of the sweep, in the median 1.4 "
            "times as fast as spatial; but sums in fixed point: the absolute error of a gradient is about 2e-6 "
            "for 800000 values, and values below 1e-5 or above 1e10 lose their digits"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .fast = 1, .row_bytes = 16, .images = {0, 257},
     .values = {786432, 0}, .algorithm = "rows:1",
     .why = "of all ways the fastest, or within 3 % of it, on 7 of 9 shapes of the sweep, in the median 4.3 "
            "times as fast as spatial; but less exact than columns where a channel begins with a value far from "
            "its others"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .fast = 1, .images = {0, 257}, .values = {786432, 0},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 3 shapes of the sweep, in the median 18 times "
            "as fast as spatial; but over channels-first memory it is persistent"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .fast = 1, .size = {49152, 0}, .algorithm = "rows",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep, in the median 15 times "
            "as fast as spatial; but less exact than columns where a channel begins with a value far from its "
            "others"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, FIRST, .channels = {192, 0}, .size = {2, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 18 of 19 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {0, 384}, .size = {0, 1024}, .values = {0, 98304},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 56 of 58 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {0, 384}, .size = {0, 1024},
     .values = {98304, 196608}, .algorithm = "columns:1",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 2 shapes of the sweep, in the median 1.4 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {0, 24}, .size = {1024, 0}, .values = {0, 196608},
     .kilobytes = {0, 1536}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep, in the median 4.3 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {0, 24}, .size = {1024, 0}, .values = {0, 196608},
     .kilobytes = {1536, 0}, .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep, in the median 2 times "
            "as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {24, 384}, .size = {1024, 0}, .values = {0, 196608},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 13 of 13 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {384, 0}, .values = {0, 196608}, .lines = {0, 3072},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 7 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {384, 0}, .values = {0, 196608}, .lines = {3072, 0},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 17 of 19 shapes of the sweep, in the median 2.3 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .images = {0, 9}, .values = {196608, 0}, .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep, in the median 1.9 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channel_bytes = 16, .images = {9, 256}, .channels = {0, 33},
     .values = {196608, 0}, .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 4 of 5 shapes of the sweep, in the median 6.3 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channel_bytes = 16, .images = {9, 256}, .channels = {33, 0},
     .values = {196608, 0}, .algorithm = "spatial",
     .why = "between the shapes of the sweep the fastest by its expected time"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .images = {9, 256}, .values = {196608, 0}, .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 5 of 6 shapes of the sweep, in the median 3.3 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .images = {256, 0}, .values = {196608, 0},
     .algorithm = "columns:1",
     .why = "of all ways the fastest, or within 3 % of it, on 10 of 13 shapes of the sweep, in the median 1.6 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 20 of 38 shapes of the sweep, in the median 1.1 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .size = {0, 4096}, .lines = {0, 16384}, .kilobytes = {0, 3},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .size = {0, 4096}, .lines = {0, 16384}, .kilobytes = {3, 32768},
     .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 17 of 17 shapes of the sweep, in the median 1.9 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .size = {4096, 0}, .lines = {0, 16384}, .kilobytes = {0, 32768},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 12 of 13 shapes of the sweep"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .images = {0, 48}, .lines = {0, 16384}, .kilobytes = {32768, 0},
     .algorithm = "rows:1",
     .why = "of all ways the fastest, or within 3 % of it, on 8 of 12 shapes of the sweep, in the median 1.2 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .images = {48, 0}, .lines = {0, 16384}, .kilobytes = {32768, 0},
     .algorithm = "columns:1",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 8 shapes of the sweep, in the median 1.5 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .lines = {16384, 0}, .kilobytes = {0, 49152},
     .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 4 of 4 shapes of the sweep, in the median 2.9 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .lines = {16384, 0}, .kilobytes = {49152, 0},
     .algorithm = "columns:1",
     .why = "of all ways the fastest, or within 3 % of it, on 20 of 22 shapes of the sweep, in the median 2 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 33 of 35 shapes of the sweep, in the median 3.4 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {0, 384}, .values = {0, 6144},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 48 of 49 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {0, 384}, .values = {6144, 98304},
     .lines = {0, 128}, .kilobytes = {0, 768}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 2 shapes of the sweep, in the median 4.5 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {0, 384}, .values = {6144, 98304},
     .lines = {0, 128}, .kilobytes = {768, 0}, .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 2 shapes of the sweep, in the median 1.9 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {0, 12}, .channels = {0, 384},
     .values = {6144, 98304}, .lines = {128, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 7 of 7 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {12, 0}, .channels = {0, 384}, .size = {0, 1024},
     .values = {6144, 98304}, .lines = {128, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 11 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {12, 0}, .channels = {0, 384}, .size = {1024, 0},
     .values = {6144, 98304}, .lines = {128, 0}, .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 3 shapes of the sweep, in the median 1.2 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {384, 0}, .values = {0, 98304},
     .lines = {0, 3072}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 7 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {384, 0}, .values = {0, 98304},
     .lines = {3072, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 14 of 17 shapes of the sweep, in the median 2.4 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {0, 9}, .values = {98304, 0}, .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep, in the median 2.6 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {9, 0}, .values = {98304, 0},
     .kilobytes = {0, 196608}, .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 16 of 16 shapes of the sweep, in the median 9.4 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .images = {9, 0}, .values = {98304, 0},
     .kilobytes = {196608, 0}, .algorithm = "columns:1",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 10 shapes of the sweep, in the median 1.5 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 17 of 36 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .values = {0, 98304}, .kilobytes = {0, 96},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 10 of 10 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .values = {0, 98304}, .kilobytes = {96, 0},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 5 of 5 shapes of the sweep, in the median 1.8 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .images = {0, 9}, .values = {98304, 0},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .images = {9, 0}, .values = {98304, 0},
     .algorithm = "columns",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 9 shapes of the sweep, in the median 9.7 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .fast = 1, .channels = {33, 0}, .kilobytes = {0, 129},
     .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 6 shapes of the sweep; but sums in fixed "
            "point: the absolute error of a gradient is about 2e-6 for 800000 values, and values below 1e-5 or "
            "above 1e10 lose their digits"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .fast = 1, .channels = {0, 6}, .lines = {24, 0},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 5 of 5 shapes of the sweep; but its error grows "
            "with mean / deviation: 4e-4 of y at 1e4"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .fast = 1, .channels = {6, 0}, .kilobytes = {0, 12},
     .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 2 shapes of the sweep; but sums in fixed "
            "point: the absolute error of a gradient is about 2e-6 for 800000 values, and values below 1e-5 or "
            "above 1e10 lose their digits"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .fast = 1, .channels = {6, 256}, .size = {0, 16},
     .kilobytes = {12, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 4 of 4 shapes of the sweep; but its error grows "
            "with mean / deviation: 4e-4 of y at 1e4"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .fast = 1, .channels = {6, 96}, .size = {16, 64},
     .kilobytes = {12, 0}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep; but its error grows "
            "with mean / deviation: 4e-4 of y at 1e4"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .fast = 1, .channels = {64, 0}, .kilobytes = {0, 48},
     .algorithm = "persistent",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 2 shapes of the sweep; but sums in fixed "
            "point: the absolute error of a gradient is about 2e-6 for 800000 values, and values below 1e-5 or "
            "above 1e10 lose their digits"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .values = {0, 768}, .kilobytes = {0, 32}, .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 6 shapes of the sweep"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .values = {768, 0}, .kilobytes = {0, 32}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep, in the median 1.5 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .channels = {0, 16}, .values = {0, 12288}, .kilobytes = {32, 1536},
     .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 2 shapes of the sweep, in the median 4.8 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .channels = {16, 0}, .values = {0, 12288}, .kilobytes = {32, 1536},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 17 of 20 shapes of the sweep, in the median 3.4 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .images = {0, 2}, .values = {0, 12288}, .kilobytes = {1536, 0},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 2 shapes of the sweep, in the median 8.6 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .images = {2, 0}, .values = {0, 12288}, .kilobytes = {1536, 32768},
     .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 7 of 9 shapes of the sweep, in the median 18 times "
            "as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .images = {2, 0}, .values = {0, 12288}, .kilobytes = {32768, 0},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep, in the median 12 times "
            "as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .values = {12288, 98304}, .kilobytes = {32, 98304},
     .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 10 of 13 shapes of the sweep, in the median 25 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, .values = {98304, 0}, .kilobytes = {32, 98304}, .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 4 of 4 shapes of the sweep, in the median 89 times "
            "as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, .channels = {0, 8}, .values = {98304, 0}, .kilobytes = {32, 98304},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 2 shapes of the sweep, in the median 1.8e+02 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, .channels = {8, 0}, .values = {98304, 0}, .kilobytes = {32, 98304},
     .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 9 of 11 shapes of the sweep, in the median 67 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .values = {12288, 786432}, .kilobytes = {98304, 0},
     .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 11 of 12 shapes of the sweep, in the median 51 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .values = {786432, 0}, .lines = {0, 4096}, .kilobytes = {98304, 0},
     .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep, in the median 1.3e+02 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .values = {786432, 0}, .lines = {4096, 0}, .kilobytes = {98304, 0},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 8 shapes of the sweep, in the median 72 times "
            "as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 54 of 112 shapes of the sweep, in the median 18 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 32 of 80 shapes of the sweep, in the median 24 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .values = {0, 1536}, .kilobytes = {0, 49152},
     .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 19 of 20 shapes of the sweep, in the median 1.7 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {0, 1024}, .values = {1536, 0},
     .kilobytes = {0, 49152}, .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 50 of 56 shapes of the sweep, in the median 1.6 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {1024, 0}, .values = {1536, 0},
     .kilobytes = {0, 49152}, .algorithm = "pointwise:1",
     .why = "of all ways the fastest, or within 3 % of it, on 4 of 4 shapes of the sweep, in the median 1.9 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {0, 64}, .kilobytes = {49152, 0},
     .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep, in the median 1.2 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {64, 65}, .kilobytes = {49152, 0},
     .algorithm = "pointwise:2",
     .why = "of all ways the fastest, or within 3 % of it, on 7 of 8 shapes of the sweep, in the median 2.3 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {65, 256}, .kilobytes = {49152, 0},
     .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep, in the median 2.7 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {256, 0}, .kilobytes = {49152, 0},
     .algorithm = "pointwise:1",
     .why = "of all ways the fastest, or within 3 % of it, on 20 of 20 shapes of the sweep, in the median 2 "
            "times as fast as spatial"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .algorithm = "pointwise",
     .why = "of all ways the fastest, or within 3 % of it, on 75 of 112 shapes of the sweep, in the median 1.6 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {0, 128}, .values = {0, 512},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 6 of 6 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channel_bytes = 16, .images = {0, 9}, .channels = {0, 128},
     .values = {512, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 10 of 13 shapes of the sweep, in the median 9.9 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channel_bytes = 16, .images = {9, 0}, .channels = {0, 128},
     .values = {512, 0}, .lines = {0, 384}, .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 5 shapes of the sweep, in the median 46 times "
            "as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channel_bytes = 16, .images = {9, 0}, .channels = {0, 128},
     .values = {512, 0}, .lines = {384, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 14 of 21 shapes of the sweep, in the median 71 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {0, 8}, .values = {512, 0}, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 8 of 8 shapes of the sweep, in the median 51 times "
            "as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {8, 128}, .values = {512, 0}, .algorithm = "graph",
     .why = "between the shapes of the sweep the fastest by its expected time"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {128, 0}, .kilobytes = {0, 48},
     .algorithm = "spatial",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 1 shapes of the sweep"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {128, 0}, .kilobytes = {48, 3072},
     .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 10 of 11 shapes of the sweep, in the median 6.9 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {128, 0}, .size = {0, 32}, .kilobytes = {3072, 0},
     .algorithm = "graph:1",
     .why = "of all ways the fastest, or within 3 % of it, on 2 of 2 shapes of the sweep, in the median 19 times "
            "as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {128, 0}, .size = {32, 0},
     .kilobytes = {3072, 262144}, .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 15 of 22 shapes of the sweep, in the median 32 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {128, 0}, .size = {32, 0},
     .kilobytes = {262144, 0}, .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 4 of 5 shapes of the sweep, in the median 42 times "
            "as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 70 of 112 shapes of the sweep, in the median 23 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .kilobytes = {0, 32}, .algorithm = "spatial",
     .why = "between the shapes of the sweep the fastest by its expected time"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .size = {0, 1025}, .kilobytes = {32, 0},
     .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 1 of 7 shapes of the sweep, in the median 13 times "
            "as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .size = {1025, 0}, .kilobytes = {32, 0}, .algorithm = "graph",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 3 shapes of the sweep, in the median 5.5 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .algorithm = "ex",
     .why = "of all ways the fastest, or within 3 % of it, on 11 of 14 shapes of the sweep, in the median 11 "
            "times as fast as spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .algorithm = "graph:2",
     .why = "of all ways the fastest, or within 3 % of it, on 3 of 10 shapes of the sweep, in the median 12 "
            "times as fast as spatial"},
