// @grafana/ui imports this CommonJS package as if it had named exports.
import * as found from './node_modules/react-custom-scrollbars-2/lib/index.js';
export const Scrollbars = found.Scrollbars ?? found.default.Scrollbars;
export default Scrollbars;
