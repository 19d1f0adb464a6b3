/* The page after a kernel's local memory, linked last: hipcpu.c makes it unreadable. Not zero, so that it lies in the file's
 * data, behind the section of local memory. */
__attribute__((section("hipcpu_page"), aligned(4096), visibility("hidden"))) char hipcpu_lds_end[4096] = {1};
