// One instruction set's kernels. Compiled once for each, with KVC_AVX2 (and KVC_AVX512), KVC_NEON or neither.
#if defined(KVC_AVX512)
#define KVC_TABLE kvc_avx512
#define KVC_NAME "avx512"
#elif defined(KVC_AVX2)
#define KVC_TABLE kvc_avx2
#define KVC_NAME "avx2"
#elif defined(KVC_NEON)
#define KVC_TABLE kvc_neon
#define KVC_NAME "neon"
#else
#define KVC_TABLE kvc_portable
#define KVC_NAME "portable"
#endif
#include "ebp.h"
#include "split.h"
#include "quant.h"
#include "stripes.h"
#include "error.h"

const kvc_kernels KVC_TABLE = {
    KVC_NAME, ebp_encode, ebp_decode, split_encode, split_decode, quant_encode, quant_decode, hash_stripes, slices_error,
};
